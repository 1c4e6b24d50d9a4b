"""Finds the differences between runs: recipe, plan, versions, data and figures."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmtrain.errors import truncate
from llmtrain.plan.plan import Plan
from llmtrain.report.facts import Figure, figures
from llmtrain.report.run import RunData, dotted

ABSENT = "—"
DATA_FIELDS = ("data.", "evaluation.sources", "evaluation.sets")
Compared = tuple[str, tuple[float | None, ...], tuple[str, ...]]
"""Label, value of each run and text of each run."""


@dataclass(frozen=True)
class Difference:
    """A field with different values."""

    field: str
    values: tuple[Any, ...]
    """The value of each run; None for a run that has none."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The values as readable texts."""
        return tuple(
            ABSENT if value is None else value if isinstance(value, str) else truncate(json.dumps(value))
            for value in self.values
        )


def differences(runs: Sequence[RunData]) -> dict[str, list[Difference]]:
    """Returns the fields in which runs differ, by group (recipe, data, plan, environment). Groups may be empty."""
    recipe = differing([run.recipe for run in runs], {"name"})
    return {
        "recipe": [difference for difference in recipe if not difference.field.startswith(DATA_FIELDS)],
        "data": [
            *(difference for difference in recipe if difference.field.startswith(DATA_FIELDS)),
            *differing([{"prepared data": run.data_key} if run.data_key else {} for run in runs]),
        ],
        "plan": differing([_plan(run.plan) for run in runs]),
        "environment": differing([_environment(run) for run in runs]),
    }


def differing(documents: Sequence[dict[str, Any]], ignored: Collection[str] = ()) -> list[Difference]:
    """Returns the fields that have different values in the documents."""
    documents = [_without_lists(document) for document in documents]
    fields = dict.fromkeys(name for document in documents for name in document)
    different = [
        Difference(name, tuple(document.get(name) for document in documents)) for name in fields if name not in ignored
    ]
    return [difference for difference in different if any(value != difference.values[0] for value in difference.values)]


def _without_lists(document: dict[str, Any]) -> dict[str, Any]:
    """Returns dotted fields in which objects in lists are numbered, such as `data.sources.0.weight`."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            flat |= _without_lists(dotted({f"{name}.{number}": item for number, item in enumerate(value)}))
        else:
            flat[name] = value
    return flat


def _plan(plan: Plan | None) -> dict[str, Any]:
    """Returns the fields of a plan other than its recipe."""
    if plan is None:
        return {}
    why = {"key", "milliseconds"}  # details of a choice of kernels; the choice itself is compared
    document = plan.model_dump(mode="json", exclude={"recipe": True, "notes": True, "kernels": why})
    document["model"].pop("weights", None)
    return dotted(document | {"layout": plan.layout()})


def _environment(run: RunData) -> dict[str, Any]:
    """Returns versions, machine and commit, without values that differ between any two starts."""
    kept = {name: value for name, value in run.environment.items() if name != "argv"}
    launch = {name: run.launch.get(name) for name in ("launcher", "world_size") if name in run.launch}
    return dotted(kept | {"launch": launch})


def compare_figures(runs: Sequence[RunData]) -> list[Compared]:
    """Returns each figure that any of the runs has."""
    known = [{figure.label: figure for figure in figures(run)} for run in runs]
    rows = []
    for label in dict.fromkeys(label for by_label in known for label in by_label):
        row = [by_label.get(label, Figure(label, None, ABSENT)) for by_label in known]
        rows.append((label, tuple(figure.value for figure in row), tuple(figure.text for figure in row)))
    return rows


def compared_metrics(a: RunData, b: RunData) -> list[Compared]:
    """Returns the figures of two runs, and the difference of their losses."""
    rows = compare_figures([a, b])
    steps, here, there = np.intersect1d(a.metrics["step"], b.metrics["step"], return_indices=True)
    losses = a.metrics.get("loss")[here], b.metrics.get("loss")[there]
    distance = np.abs(losses[0] - losses[1])
    if np.isfinite(distance).any():
        last, largest = int(np.flatnonzero(np.isfinite(distance))[-1]), int(np.nanargmax(distance))
        found_at = [("the last common step", last)]
        if distance[largest]:
            found_at.append(("the step where they differ most", largest))
        for label, at in found_at:
            pair = tuple(float(loss[at]) for loss in losses)
            rows.append((f"loss at {label}, {steps[at]:,.0f}", pair, tuple(f"{value:.6g}" for value in pair)))
    return rows
