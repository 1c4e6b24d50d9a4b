"""Decides whether a run ends because its evaluations do not improve any more."""

from __future__ import annotations

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.errors import Problem, RecipeError, abbreviate, did_you_mean
from llmtrain.recipe import EarlyStoppingConfig, Recipe


def reason_to_stop(config: EarlyStoppingConfig, state: TrainerState) -> str:
    """Counts the evaluation in `state.eval_metrics`; returns why the run ends after it, or an empty text.

    A value that is not finite is no improvement.
    """
    value, sign = state.eval_metrics.get(config.metric), -1 if config.mode == "max" else 1
    if value is not None and (state.best is None or sign * (state.best - value) > config.min_improvement):
        state.best, state.without_improvement = value, 0
        return ""
    state.without_improvement += 1
    if state.without_improvement < config.patience:
        return ""
    best = "none was finite" if state.best is None else f"the best one is {state.best:.6g}"
    return f"{config.metric} did not improve in {state.without_improvement} evaluations; {best}"


def check_metrics(recipe: Recipe, state: TrainerState) -> None:
    """Raises RecipeError if the last evaluation lacks a metric by which the recipe decides."""
    wanted = {"checkpoint.best_metric": recipe.checkpoint.best_metric} if recipe.checkpoint.keep_best else {}
    if recipe.train.early_stopping:
        wanted["train.early_stopping.metric"] = recipe.train.early_stopping.metric
    known = list(state.eval_metrics)
    problems = [
        Problem(
            "evaluation.metric",
            field,
            f"the evaluation after step {state.step:,} has no metric {name}{did_you_mean(name, known)}",
            f"its metrics are {abbreviate(known, 20)}",
        )
        for field, name in wanted.items()
        if name not in known
    ]
    if problems:
        raise RecipeError(problems)
