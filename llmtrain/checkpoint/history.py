"""What a run was trained with, from which step on. Each checkpoint holds it, so it says what made these weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmtrain.plan import Plan
from llmtrain.run_dir import MAY_CHANGE

Values = dict[str, Any]
WORKERS = "workers"
"""Beside the fields of the recipe: how many there were."""


@dataclass(frozen=True)
class Segment:
    """The steps that were taken with the same values."""

    step: int
    """Steps taken before."""
    samples: int
    """Sequences consumed before."""
    values: Values
    """Of all fields that may change."""


def with_plan(history: list[Segment], step: int, samples: int, plan: Plan) -> list[Segment]:
    """The history of a run that goes on after `step` under a plan."""
    fields = {name: value for name, value in plan.recipe.dotted().items() if MAY_CHANGE.fullmatch(name)}
    values = {**fields, WORKERS: plan.workers}
    if history and history[-1].values == values:
        return history
    return [*(one for one in history if one.step < step), Segment(step, samples, values)]


def changes(before: Values, after: Values) -> list[str]:
    """`FIELD OLD → NEW` for each value that differs."""
    fields = [*after, *(field for field in before if field not in after)]
    return [
        f"{field} {_told(before.get(field))} → {_told(after.get(field))}"
        for field in fields
        if before.get(field) != after.get(field)
    ]


def course(history: list[Segment], field: str) -> list[tuple[int, Any]]:
    """The values of a field, each with the step after which it was taken."""
    found: list[tuple[int, Any]] = []
    for one in history:
        value = one.values.get(field)
        if not found or found[-1][1] != value:
            found.append((one.step, value))
    return found


def _told(value: Any) -> str:
    return "none" if value is None or value == [] else str(value)
