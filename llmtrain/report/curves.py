"""The curves of a run for a page: which rows of a long table are kept, and how they are written."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llmtrain.report.run import RunData
from llmtrain.report.table import Column, MetricsTable

MOST_NUMBERS = 140_000
"""Numbers of one run on a page, of eight bytes each; several runs share twice as many."""
JUDGED = ("loss", "grad_norm", "tokens_per_second", "data_wait_s", "save_blocked_s", "slowest_ratio", "step_time_s")
"""Columns whose extremes are always kept. The others follow these, or never fall."""
MOST_JUDGED = 12
AXES = ("step", "tokens", "hours")
LEFT_OUT = (
    *("samples", "tokens_per_second_per_device", "skipped_steps", "rollbacks"),
    *("time", "left_s", "device_hours", "cost", "cost_at_end"),
)
"""Columns without a curve: proportional to others, or shown as marks or figures."""


@dataclass(frozen=True)
class Chart:
    """Columns that share a picture."""

    title: str
    unit: str
    """Format of the numbers: `number`, `rate`, `bytes`, `seconds` or `share`."""
    training: tuple[str, ...] = ()
    evaluation: tuple[str, ...] = ()


CHARTS = (
    Chart("Loss", "number", ("loss",), ("eval_loss",)),
    Chart("Perplexity", "number", (), ("perplexity",)),
    Chart("Bits per byte", "number", (), ("bits_per_byte",)),
    Chart("Gradient norm", "number", ("grad_norm",)),
    Chart("Learning rate", "number", ("lr",)),
    Chart("Tokens per second", "rate", ("tokens_per_second",)),
    Chart("MFU", "share", ("mfu",)),
    Chart("TFLOP/s per device", "number", ("tflops_per_device",)),
    Chart("Step time", "seconds", ("step_time_s",)),
    Chart("Waiting for data, per step", "seconds", ("data_wait_s",)),
    Chart("Blocked by saves", "seconds", ("save_blocked_s",)),
    Chart("Peak memory of rank 0", "bytes", ("peak_memory_bytes",)),
    Chart("Slowest rank's own time, over the median", "number", ("slowest_ratio",)),
    Chart("Rewards", "number", ("rewards_chosen", "rewards_rejected", "reward_margin")),
    Chart("Reward accuracy", "share", ("reward_accuracy",), ("reward_accuracy",)),
)
SHOWN_IN_WORDS = ("slowest_rank",)
"""Columns that a page has for its texts, and that are no curves."""


def charts_of(runs: Sequence[RunData]) -> list[Chart]:
    """Returns the charts for which a run has numbers; other columns get charts of their own."""
    training = _finite_names([run.metrics for run in runs])
    evaluation = _finite_names([run.evaluations for run in runs])
    drawn = {"tflops_per_device"} if "mfu" in training else set()  # the same curve
    found = []
    for chart in CHARTS:
        own = Chart(
            chart.title,
            chart.unit,
            tuple(name for name in chart.training if name in training - drawn),
            tuple(name for name in chart.evaluation if name in evaluation),
        )
        drawn |= {*chart.training, *chart.evaluation}
        if own.training or own.evaluation:
            found.append(own)
    drawn |= {*AXES, *LEFT_OUT, *SHOWN_IN_WORDS}
    groups: dict[str, list[str]] = {}
    for name in sorted(evaluation - drawn):
        groups.setdefault(name.partition("/")[0], []).append(name)
    of_sets = [Chart(_title(group), "number", (), tuple(names)) for group, names in groups.items()]
    others = [Chart(_title(name), "number", (name,)) for name in sorted(training - drawn)]
    evaluated = [chart for chart in found if chart.evaluation]
    return [*evaluated, *of_sets, *(chart for chart in found if not chart.evaluation), *others]


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize().replace("Eval loss", "Evaluation loss")


def _finite_names(tables: Sequence[MetricsTable]) -> set[str]:
    return {name for table in tables for name in table.names if table.last(name) is not None}


@dataclass(frozen=True)
class Curves:
    """The rows of a table that a page has, whole ones, as columns."""

    rows: int
    """Number of rows of the table."""
    columns: Mapping[str, Column]

    def document(self) -> dict[str, object]:
        """Returns JSON data: each column as base64 of 64-bit floats, the least significant byte first."""
        encoded = {name: base64.b64encode(one.astype("<f8").tobytes()).decode() for name, one in self.columns.items()}
        return {"rows": self.rows, "columns": encoded}


def curves_of(run: RunData, charts: Sequence[Chart], runs: int = 1) -> tuple[Curves, Curves]:
    """Returns the rows of logged steps and of evaluations for a page of so many runs.

    A short run has all of them. Of a long one, whole rows are kept: some at equal distances and, in each of some
    hundred intervals, those with the least and the greatest value of each column, and the first one that is not finite.
    """
    names = [*dict.fromkeys(name for chart in charts for name in chart.training), *SHOWN_IN_WORDS]
    train = _in_order(run.metrics, names)
    train["tokens"] = _in_order(run.metrics, ["tokens"])["tokens"]
    train["hours"] = hours_of(run.metrics)
    numbers = MOST_NUMBERS if runs == 1 else 2 * MOST_NUMBERS // runs
    evaluation_names = dict.fromkeys(name for chart in charts for name in chart.evaluation)
    evaluations = _in_order(run.evaluations, list(evaluation_names))
    for axis in AXES[1:]:
        evaluations[axis] = _at(evaluations["step"], train["step"], train[axis])
    return _kept(train, numbers * 3 // 4), _kept(evaluations, numbers // 4)


def hours_of(table: MetricsTable) -> Column:
    """Returns the hours until each row, in order of the steps: those in steps and in saves that blocked them."""
    ordered = _in_order(table, ["step_time_s", "save_blocked_s"])
    taken = np.diff(ordered["step"], prepend=0.0)
    seconds = np.nan_to_num(ordered["step_time_s"]) * taken + np.nan_to_num(ordered["save_blocked_s"])
    hours: Column = np.cumsum(seconds) / 3600
    return hours


def _in_order(table: MetricsTable, names: Sequence[str]) -> dict[str, Column]:
    """Returns columns by step. Of rows of the same step, which only a damaged file has, the last one is kept."""
    steps = table["step"]
    backwards, first = np.unique(steps[::-1], return_index=True)
    order = len(steps) - 1 - first
    return {"step": backwards} | {name: table.get(name)[order] for name in names}


def _at(steps: Column, known: Column, values: Column) -> Column:
    """Returns values at steps, between known ones in proportion; they begin with 0 at step 0."""
    is_known = np.isfinite(values)
    if not is_known.any():
        return np.full(len(steps), math.nan)
    at: Column = np.interp(steps, np.r_[0.0, known[is_known]], np.r_[0.0, values[is_known]])
    return at


def _kept(columns: dict[str, Column], numbers: int) -> Curves:
    """Returns at most so many numbers of a table, in whole rows."""
    columns = {name: one for name, one in columns.items() if name == "step" or np.isfinite(one).any()}
    rows, most = len(columns["step"]), max(2, numbers // len(columns))
    if rows <= most:
        return Curves(rows, columns)
    judged = [columns[name] for name in columns if name in JUDGED or "loss" in name][:MOST_JUDGED]
    intervals = most // 2 // (3 * len(judged)) if judged else 0
    chosen = [np.linspace(0, rows - 1, most // 2).astype(np.int64)]
    if intervals:
        edges = np.linspace(0, rows, intervals + 1).astype(np.int64)
        chosen += [_extremes(one, edges) for one in judged]
    kept = np.unique(np.concatenate(chosen))
    return Curves(rows, {name: one[kept] for name, one in columns.items()})


def _extremes(column: Column, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    found = []
    is_finite = np.isfinite(column)
    least, most = np.where(is_finite, column, np.inf), np.where(is_finite, column, -np.inf)
    for start, end in pairwise(edges):
        found += [
            start + least[start:end].argmin(),
            start + most[start:end].argmax(),
            start + is_finite[start:end].argmin(),
        ]
    return np.array(found, np.int64)
