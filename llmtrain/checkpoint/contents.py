"""The documents of a checkpoint that describe its state, read without torch and validated.

Among them is the history of its weights: the values that the run was trained with, by step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from llmtrain.checkpoint.folder import PLAN_FILE, STATE_FILE
from llmtrain.checkpoint.manifest import Count, read_checkpoint_json
from llmtrain.errors import CheckpointError, Problem, format_value
from llmtrain.plan import Plan
from llmtrain.recipe import Recipe
from llmtrain.run_dir import MAY_CHANGE, MAY_CHANGE_IF_ALLOWED

Values = dict[str, Any]
WORKERS = "workers"
"""The number of workers, which is recorded like a field of the recipe."""


@dataclass(frozen=True)
class Segment:
    """The steps that were taken with the same values."""

    step: int
    """Number of steps taken before."""
    samples: int
    """Number of sequences consumed before."""
    values: Values
    """The values of all fields that may change."""


def with_plan(history: list[Segment], step: int, samples: int, plan: Plan) -> list[Segment]:
    """Returns the history of a run that continues after `step` under a plan."""
    declared = plan.recipe.dotted()
    fields = {
        name: value
        for name, value in declared.items()
        if MAY_CHANGE.fullmatch(name) or MAY_CHANGE_IF_ALLOWED.fullmatch(name)
    }
    own = {f"code.{name}": version for name, version in (plan.code.described() if plan.code else {}).items()}
    values = {**fields, **own, WORKERS: plan.workers}
    last = history[-1].values if history else {}
    # Earlier checkpoints lack some of these fields, which could not change then.
    if history and values == {
        **{name: value for name, value in values.items() if MAY_CHANGE_IF_ALLOWED.fullmatch(name)},
        **last,
    }:
        return history
    return [*(segment for segment in history if segment.step < step), Segment(step, samples, values)]


def changed_values(before: Values, after: Values) -> list[str]:
    """Returns `FIELD OLD → NEW` for each value that differs."""
    fields = [*after, *(field for field in before if field not in after)]
    return [
        f"{field} {_shown(before.get(field))} → {_shown(after.get(field))}"
        for field in fields
        if before.get(field) != after.get(field)
    ]


def values_by_step(history: list[Segment], field: str) -> list[tuple[int, Any]]:
    """Returns the values of a field, each with the step after which it applies."""
    changes: list[tuple[int, Any]] = []
    for segment in history:
        value = segment.values.get(field)
        if not changes or changes[-1][1] != value:
            changes.append((segment.step, value))
    return changes


def _shown(value: Any) -> str:
    return "none" if value is None or value == [] else format_value(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class CallbacksState:
    """What the callbacks of a run keep from one step to the next."""

    states: dict[str, Any] = field(default_factory=dict)
    """The `state_dict()` of each callback that has one, by its name in the run."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Their metrics for the next logged step."""
    errors: Count = 0
    """Number of errors that were counted."""


@dataclass
class TrainerState:
    """The position of a run; the content of `trainer.json`."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: Count = 0
    """Number of optimizer steps taken."""
    samples: Count = 0
    """Number of sequences consumed: the position in the data, independent of the batch size."""
    tokens: Count = 0
    """Number of target tokens consumed."""
    data: str = ""
    """Key of the prepared data to which `samples` refers."""
    base: str = ""
    """Hash of the pretrained weights that are frozen and not in the checkpoint."""
    eval_loss: float | None = None
    """Loss of the last evaluation, in nats per token."""
    eval_step: Count | None = None
    """Step of that evaluation."""
    eval_metrics: dict[str, float | None] = field(default_factory=dict)
    """All metrics of that evaluation, by name: `perplexity`, `eval_loss_by_set/NAME`; None if not finite."""
    best: float | None = None
    """The best value of `train.early_stopping.metric` so far."""
    without_improvement: Count = 0
    """Number of evaluations since then."""
    callbacks: CallbacksState = CallbacksState()
    ended: str = ""
    """Why the run has ended before its last step; empty if it has not."""
    rollbacks: Count = 0
    """Number of rollbacks to a checkpoint after too many skipped updates."""
    passed_over: Count = 0
    """Sequences among `samples` that these weights were not trained on: those skipped by rollbacks."""
    history: list[Segment] = field(default_factory=list)
    """The values that the steps were taken with."""

    def text(self) -> str:
        """Returns the content of `trainer.json`."""
        return json.dumps(asdict(self), indent=1)


def read_state(folder: Path) -> TrainerState:
    """Reads the position in a checkpoint. Raises CheckpointError if it cannot be read."""
    return read_checkpoint_json(folder / STATE_FILE, TrainerState, "checkpoint.state")


def read_plan(folder: Path) -> Plan:
    """Reads the plan that a checkpoint was written under. Raises CheckpointError if it cannot be read."""
    return read_checkpoint_json(folder / PLAN_FILE, Plan, "checkpoint.plan")


def why_ended(folder: Path, ended: str, recipe: Recipe) -> str:
    """Returns why the run of a checkpoint has ended before its last step, unless the recipe now decides otherwise.

    ended: the reason in the checkpoint; empty if the run has not ended.
    """
    fields: Any = {"callbacks": True, "train": {"early_stopping"}}
    if not ended:
        return ""
    before = read_plan(folder).recipe
    decides = [one.model_dump(mode="json", include=fields) for one in (before, recipe)]
    return ended if decides[0] == decides[1] else ""


def forget_other_metric(state: TrainerState, folder: Path, recipe: Recipe) -> None:
    """Forgets the best evaluation so far if it is not of the metric that `train.early_stopping` now names."""
    if state.best is None:
        return
    before, now = read_plan(folder).recipe.train.early_stopping, recipe.train.early_stopping
    if not (before and now and (before.metric, before.mode) == (now.metric, now.mode)):
        state.best, state.without_improvement = None, 0


def check_trusted(folder: Path, plan: Plan, trust_remote_code: bool, whole_recipe: bool = False) -> None:
    """Raises CheckpointError if a checkpoint leads to code that only the checkpoint trusts.

    Whoever wrote the checkpoint may also have written that code. trust_remote_code: whether the user permits running
    it, on the command line or in the recipe. whole_recipe: whether objects other than the model are imported, too.
    """
    recipe, problems = plan.recipe, []
    fix = "inspect the code, and permit it with --trust-remote-code"
    if recipe.model.trust_remote_code:
        field = f"{folder / PLAN_FILE}: model.trust_remote_code"
        message = f"is true, which would run the code that comes with '{recipe.model.pretrained}'; a checkpoint "
        problems.append(Problem("checkpoint.remote_code", field, f"{message}cannot permit this itself", fix))
    averages = plan.optimizer is not None and plan.optimizer.averages  # an export then calls the optimizer
    for field, path in recipe.own_objects.items():
        if not (whole_recipe or field.startswith("model.") or (averages and field == "optim.name")):
            continue
        message = (
            f"names {path}, which would import code from {recipe.code_dir}; a checkpoint cannot permit this itself"
        )
        problems.append(Problem("checkpoint.own_code", f"{folder / PLAN_FILE}: {field}", message, fix))
    if problems and not trust_remote_code:
        raise CheckpointError(problems)
