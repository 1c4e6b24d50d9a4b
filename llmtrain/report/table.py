"""The lines of `metrics.jsonl` as columns of numbers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_ROWS = 4_000_000
MAX_COLUMNS = 256
MAX_STEP = 2**53
MAX_VALUE = 1e40
"""Beyond what fp32 can hold; sums and products of smaller numbers are finite."""
Column = NDArray[np.float64]


class MetricsTable:
    """Rows of numbers in the order of their lines, as columns by name.

    Missing and non-finite numbers are NaN. A group of numbers has one column for each: `eval_loss_by_source/NAME`.
    """

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {"step": array("d")}

    def __len__(self) -> int:
        return len(self._columns["step"])

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in order of first appearance."""
        return tuple(self._columns)

    def __getitem__(self, name: str) -> Column:
        """Returns a column. Raises KeyError if no row has it."""
        return np.array(self._columns[name])

    def get(self, name: str) -> Column:
        """Returns a column; if it does not exist, a column of NaN."""
        return self[name] if name in self else np.full(len(self), np.nan)

    def to_pandas(self) -> DataFrame:
        """Returns the table as a pandas data frame. pandas is installed with `datasets`."""
        from pandas import DataFrame

        return DataFrame({name: self[name] for name in self._columns})

    def last(self, name: str) -> float | None:
        """Returns the last finite number of a column, or None."""
        return next((value for value in reversed(self._columns.get(name, ())) if math.isfinite(value)), None)

    def rows(self) -> Iterator[dict[str, float]]:
        """Yields, for each row, column name → number, without NaN."""
        for values in zip(*self._columns.values(), strict=True):
            yield {name: value for name, value in zip(self._columns, values, strict=True) if not math.isnan(value)}

    def add(self, record: Mapping[str, Any]) -> bool:
        """Adds a record as a row. Returns False if it has no valid step, or if the table is full."""
        step = record.get("step")
        if type(step) is not int or not 0 <= step < MAX_STEP or len(self) >= MAX_ROWS:
            return False
        length = len(self)
        for name, value in dict(_flat(record)).items():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MAX_COLUMNS:
                    continue
                column = self._columns[name] = array("d", [math.nan]) * length
            column.append(value)
        for column in self._columns.values():
            if len(column) == length:
                column.append(math.nan)
        return True


def _flat(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from (
                (f"{name}/{key}", number) for key, item in value.items() if (number := as_number(item)) is not None
            )
        elif (number := as_number(value)) is not None:
            yield name, number


def as_number(value: Any) -> float | None:
    """Returns a number as a float, NaN for None and numbers that are not finite or huge, and None for anything else."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if abs(number) <= MAX_VALUE else math.nan
