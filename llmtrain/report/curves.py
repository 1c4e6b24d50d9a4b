"""The curves of a run on a page: selects rows of long tables, and encodes them."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llmtrain.report.run import RunData
from llmtrain.report.table import Column, MetricsTable

MAX_NUMBERS = 140_000
"""Limit of the numbers (of eight bytes each) of a single run on a page. Several runs share twice as many."""
JUDGED = ("loss", "grad_norm", "tokens_per_second", "data_wait_s", "save_blocked_s", "slowest_ratio", "step_time_s")
"""Columns whose extremes are always kept. Other columns follow these, or never decrease."""
MAX_JUDGED = 12
X_AXES = ("step", "tokens", "hours")
LEFT_OUT = (
    *("samples", "tokens_per_second_per_device", "skipped_steps", "rollbacks"),
    *("time", "left_s", "device_hours", "cost", "cost_at_end"),
)
"""Columns without a curve, because they are proportional to others or are shown as marks or figures."""


@dataclass(frozen=True)
class Chart:
    """Columns that share a chart."""

    title: str
    unit: str
    """Format of the numbers: `number`, `rate`, `bytes`, `seconds` or `share`."""
    training: tuple[str, ...] = ()
    evaluation: tuple[str, ...] = ()


CHARTS = (
    Chart("Loss", "number", ("loss",), ("eval_loss",)),
    Chart("Perplexity", "number", (), ("perplexity",)),
    Chart("Bits per byte", "number", (), ("bits_per_byte",)),
    Chart("Router loss", "number", ("router_loss",)),
    Chart("Tokens of the busiest expert, over the mean", "number", ("expert_load",)),
    Chart("Gradient norm", "number", ("grad_norm",)),
    Chart("Learning rate", "number", ("lr",)),
    Chart("Tokens per second", "rate", ("tokens_per_second",)),
    Chart("MFU", "share", ("mfu",)),
    Chart("TFLOP/s per device", "number", ("tflops_per_device",)),
    Chart("Step time", "seconds", ("step_time_s",)),
    Chart("Waiting for data, per step", "seconds", ("data_wait_s",)),
    Chart("Blocked by saves", "seconds", ("save_blocked_s",)),
    Chart("In callbacks", "seconds", ("callbacks_s",)),
    Chart("Peak memory of rank 0", "bytes", ("peak_memory_bytes",)),
    Chart("Slowest rank's own time, over the median", "number", ("slowest_ratio",)),
    Chart("Rewards", "number", ("rewards_chosen", "rewards_rejected", "reward_margin")),
    Chart("Reward accuracy", "share", ("reward_accuracy",), ("reward_accuracy",)),
)
_OF_PARTS = re.compile("_by_(set|source)/")
"""Matches the columns of sets and sources."""
SHOWN_IN_WORDS = ("slowest_rank",)
"""Columns that a page only uses in texts, not as curves."""


def charts_of(runs: Sequence[RunData]) -> list[Chart]:
    """Returns the charts for which any of the runs has numbers. Columns of no known chart get their own."""
    training = _finite_names([run.metrics for run in runs])
    evaluation = _finite_names([run.evaluations for run in runs])
    drawn = {"tflops_per_device"} if "mfu" in training else set()  # the same curve
    charts = []
    for chart in CHARTS:
        present = Chart(
            chart.title,
            chart.unit,
            tuple(name for name in chart.training if name in training - drawn),
            tuple(name for name in chart.evaluation if name in evaluation),
        )
        drawn |= {*chart.training, *chart.evaluation}
        if present.training or present.evaluation:
            charts.append(present)
    drawn |= {*X_AXES, *LEFT_OUT, *SHOWN_IN_WORDS}
    groups: dict[str, list[str]] = {}
    for name in sorted(evaluation - drawn):
        groups.setdefault(name.partition("/")[0], []).append(name)
    of_sets = [Chart(_title(group), "number", (), tuple(names)) for group, names in groups.items()]
    others = [Chart(_title(name), "number", (name,)) for name in sorted(training - drawn)]
    evaluated = [chart for chart in charts if chart.evaluation]
    return [*evaluated, *of_sets, *(chart for chart in charts if not chart.evaluation), *others]


def names_of_callbacks(run: RunData) -> list[str]:
    """Returns the columns with numbers that llmtrain does not write itself: the metrics of callbacks."""
    known = {name for chart in CHARTS for name in (*chart.training, *chart.evaluation)}
    names = (name for chart in charts_of([run]) for name in (*chart.training, *chart.evaluation))
    return [name for name in names if name not in known and not _OF_PARTS.search(name)]


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize().replace("Eval loss", "Evaluation loss")


def _finite_names(tables: Sequence[MetricsTable]) -> set[str]:
    return {name for table in tables for name in table.names if table.last(name) is not None}


@dataclass(frozen=True)
class Curves:
    """The rows of a table that are shown on a page, as columns of equal length."""

    rows: int
    """Number of rows of the whole table."""
    columns: Mapping[str, Column]

    def document(self) -> dict[str, object]:
        """Returns JSON data, with each column as base64 of little-endian 64-bit floats."""
        encoded = {
            name: base64.b64encode(column.astype("<f8").tobytes()).decode() for name, column in self.columns.items()
        }
        return {"rows": self.rows, "columns": encoded}


def curves_of(run: RunData, charts: Sequence[Chart], runs: int) -> tuple[Curves, Curves]:
    """Returns the rows of logged steps and of evaluations for a page of `runs` runs.

    A short run keeps all rows. A long run keeps rows at equal distances. In each of some hundred intervals, it also
    keeps the rows with the minimum, the maximum and the first non-finite value of each judged column.
    """
    names = [*dict.fromkeys(name for chart in charts for name in chart.training), *SHOWN_IN_WORDS]
    train = _sorted_by_step(run.metrics, names)
    train["tokens"] = _sorted_by_step(run.metrics, ["tokens"])["tokens"]
    train["hours"] = hours_of(run.metrics)
    numbers = MAX_NUMBERS if runs == 1 else 2 * MAX_NUMBERS // runs
    evaluation_names = dict.fromkeys(name for chart in charts for name in chart.evaluation)
    evaluations = _sorted_by_step(run.evaluations, list(evaluation_names))
    for axis in X_AXES[1:]:
        evaluations[axis] = _interpolated(evaluations["step"], train["step"], train[axis])
    return _thinned(train, numbers * 3 // 4), _thinned(evaluations, numbers // 4)


def hours_of(table: MetricsTable) -> Column:
    """Returns, for each row in order of the steps, the hours so far in steps and in saves that blocked training."""
    ordered = _sorted_by_step(table, ["step_time_s", "save_blocked_s"])
    steps = np.diff(ordered["step"], prepend=0.0)
    seconds = np.nan_to_num(ordered["step_time_s"]) * steps + np.nan_to_num(ordered["save_blocked_s"])
    hours: Column = np.cumsum(seconds) / 3600
    return hours


def _sorted_by_step(table: MetricsTable, names: Sequence[str]) -> dict[str, Column]:
    """Returns columns sorted by step. If rows have the same step (only in a damaged file), keeps the last one."""
    steps = table["step"]
    backwards, first = np.unique(steps[::-1], return_index=True)
    order = len(steps) - 1 - first
    return {"step": backwards} | {name: table.get(name)[order] for name in names}


def _interpolated(steps: Column, known: Column, values: Column) -> Column:
    """Returns values at steps by linear interpolation between the known ones, starting with 0 at step 0."""
    is_known = np.isfinite(values)
    if not is_known.any():
        return np.full(len(steps), math.nan)
    at: Column = np.interp(steps, np.r_[0.0, known[is_known]], np.r_[0.0, values[is_known]])
    return at


def _thinned(columns: dict[str, Column], numbers: int) -> Curves:
    """Returns whole rows of a table with about `numbers` numbers at most."""
    columns = {name: column for name, column in columns.items() if name == "step" or np.isfinite(column).any()}
    rows, most = len(columns["step"]), max(2, numbers // len(columns))
    if rows <= most:
        return Curves(rows, columns)
    judged = [columns[name] for name in columns if name in JUDGED or "loss" in name][:MAX_JUDGED]
    intervals = most // 2 // (3 * len(judged)) if judged else 0
    chosen = [np.linspace(0, rows - 1, most // 2).astype(np.int64)]
    if intervals:
        edges = np.linspace(0, rows, intervals + 1).astype(np.int64)
        chosen += [_extremes(column, edges) for column in judged]
    kept = np.unique(np.concatenate(chosen))
    return Curves(rows, {name: column[kept] for name, column in columns.items()})


def _extremes(column: Column, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    rows = []
    is_finite = np.isfinite(column)
    least, most = np.where(is_finite, column, np.inf), np.where(is_finite, column, -np.inf)
    for start, end in pairwise(edges):
        rows += [
            start + least[start:end].argmin(),
            start + most[start:end].argmax(),
            start + is_finite[start:end].argmin(),
        ]
    return np.array(rows, np.int64)
