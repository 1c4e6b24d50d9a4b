"""The values that a run was trained with, by step. Each checkpoint contains this history of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmtrain.plan import Plan
from llmtrain.run_dir import MAY_CHANGE

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
    fields = {name: value for name, value in plan.recipe.dotted().items() if MAY_CHANGE.fullmatch(name)}
    values = {**fields, WORKERS: plan.workers}
    if history and history[-1].values == values:
        return history
    return [*(one for one in history if one.step < step), Segment(step, samples, values)]


def changes(before: Values, after: Values) -> list[str]:
    """Returns `FIELD OLD → NEW` for each value that differs."""
    fields = [*after, *(field for field in before if field not in after)]
    return [
        f"{field} {_told(before.get(field))} → {_told(after.get(field))}"
        for field in fields
        if before.get(field) != after.get(field)
    ]


def course(history: list[Segment], field: str) -> list[tuple[int, Any]]:
    """Returns the values of a field, each with the step after which it applies."""
    found: list[tuple[int, Any]] = []
    for one in history:
        value = one.values.get(field)
        if not found or found[-1][1] != value:
            found.append((one.step, value))
    return found


def _told(value: Any) -> str:
    return "none" if value is None or value == [] else str(value)
