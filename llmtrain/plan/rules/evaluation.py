"""Rules for the evaluation: options without effect are refused."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules.rule import Fault, assignment, rule
from llmtrain.recipe import DataConfig

DEFAULT_FRACTION = DataConfig.model_fields["eval_fraction"].default


@rule("evaluation.never", "With `every_steps` 0, nothing is ever evaluated.", "arithmetic")
def never(draft: Draft) -> Iterator[Fault]:
    """Refuses evaluation options if there is no evaluation."""
    evaluation = draft.recipe.evaluation
    if evaluation.every_steps:
        return
    fix = assignment(evaluation__every_steps=draft.recipe.train.max_steps)
    if evaluation.sources:
        yield Fault(
            "evaluation.sources", "sources were given, but evaluation.every_steps is 0: there is no evaluation", fix
        )
    if evaluation.at_start:
        yield Fault(
            "evaluation.at_start", "true was given, but evaluation.every_steps is 0: there is no evaluation", fix
        )


@rule("evaluation.fraction", "If `evaluation.sources` are given, no training data are held out.", "arithmetic")
def fraction(draft: Draft) -> Iterator[Fault]:
    """Refuses a held-out fraction together with separate evaluation sources."""
    given = draft.recipe.data.eval_fraction
    if draft.recipe.evaluation.sources and given not in (0, DEFAULT_FRACTION):
        message = f"{given} was given together with evaluation.sources, with which no training data are held out"
        yield Fault("data.eval_fraction", message, assignment(data__eval_fraction=0))


@rule("evaluation.weight", "An evaluation reads each source separately, so weights have no effect.", "arithmetic")
def weight(draft: Draft) -> Iterator[Fault]:
    """Refuses weights of sources that are only evaluated on."""
    for number, source in enumerate(draft.recipe.evaluation.sources):
        if source.weight != 1:
            message = f"{source.weight} was given, but weights only mix the training data"
            yield Fault(f"evaluation.sources.{number}.weight", message, "leave it out")


RULES = (never, fraction, weight)
