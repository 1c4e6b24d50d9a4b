"""What differs between runs: recipe, plan, versions, data and figures."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.errors import short
from llmtrain.plan.plan import Plan
from llmtrain.report.facts import figures
from llmtrain.report.run import RunData, dotted

ABSENT = "—"


@dataclass(frozen=True)
class Difference:
    """A field with different values."""

    field: str
    values: tuple[Any, ...]
    """One for each run; None if it has none."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The values for people."""
        return tuple(ABSENT if one is None else one if isinstance(one, str) else short(json.dumps(one)) for one in self.values)


def differences(runs: Sequence[RunData]) -> dict[str, list[Difference]]:
    """Returns the fields in which runs differ, by group: recipe, plan, environment; a group may be empty."""
    return {
        "recipe": differing([run.recipe for run in runs], {"name"}),
        "plan": differing([_plan(run.plan) for run in runs]),
        "environment": differing([_environment(run) for run in runs]),
    }


def differing(documents: Sequence[dict[str, Any]], ignored: Collection[str] = ()) -> list[Difference]:
    """Returns the fields that have different values in the documents."""
    documents = [_without_lists(one) for one in documents]
    fields = dict.fromkeys(name for one in documents for name in one)
    found = [Difference(name, tuple(one.get(name) for one in documents)) for name in fields if name not in ignored]
    return [one for one in found if any(value != one.values[0] for value in one.values)]


def _without_lists(document: dict[str, Any]) -> dict[str, Any]:
    """Returns dotted fields in which the objects in lists have names, too: `data.sources.0.weight`."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, list) and any(isinstance(one, dict) for one in value):
            flat |= _without_lists(dotted({f"{name}.{number}": one for number, one in enumerate(value)}))
        else:
            flat[name] = value
    return flat


def figures_beside(runs: Sequence[RunData]) -> list[tuple[str, tuple[str, ...]]]:
    """Returns the label of each figure that a run has, and its text for each of them."""
    known = [{one.label: one.text for one in figures(run)} for run in runs]
    labels = dict.fromkeys(label for one in known for label in one)
    return [(label, tuple(one.get(label, ABSENT) for one in known)) for label in labels]


def _plan(plan: Plan | None) -> dict[str, Any]:
    """Returns what a plan has besides its recipe."""
    if plan is None:
        return {}
    document = plan.model_dump(mode="json", exclude={"recipe", "notes"})
    document["model"].pop("weights", None)
    return dotted(document | {"layout": plan.layout()})


def _environment(run: RunData) -> dict[str, Any]:
    """Returns versions, machine and commit, without what differs from start to start."""
    kept = {name: value for name, value in run.environment.items() if name != "argv"}
    launch = {name: run.launch.get(name) for name in ("launcher", "world_size") if name in run.launch}
    return dotted(kept | {"launch": launch})
