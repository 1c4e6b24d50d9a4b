"""The numbers in columns of rows, which a loss of the user's own is given (`objective.columns`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llmtrain.errors import DataError, Problem, did_you_mean, format_value

LARGEST_INTEGER = 2**24
"""Up to here, fp32 has every integer."""
LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number of fp32."""
DROP = "correct the row, or leave such rows out: --set data.faulty_rows=drop"


def values_of(row: dict[str, Any], columns: Sequence[str], place: str, of_texts: bool = False) -> tuple[float, ...]:
    """Returns the number in each of some columns of a row.

    place: the position of the row. of_texts: whether every cell is a text, as in CSV files, so that a number is one,
    too. Raises DataError with every column that is missing, or that has no number that fp32 can hold.
    """
    numbers: list[float] = []
    problems: list[Problem] = []
    for name in columns:
        if name not in row:
            message = f"has no column '{name}'{did_you_mean(name, list(row))} (columns: {', '.join(row) or 'none'})"
            fix = "name a column of the rows in objective.columns, or add it in `map` of the source"
            problems.append(Problem("data.column", place, message, fix))
            continue
        value = _parsed(row[name]) if of_texts else row[name]
        if fault := _fault(value):
            problems.append(Problem("data.column", place, f"column '{name}' {fault}", DROP))
        else:
            numbers.append(float(value))
    if problems:
        raise DataError(problems)
    return tuple(numbers)


def _parsed(cell: Any) -> Any:
    """Returns the number that a text is; anything else as it is."""
    if not isinstance(cell, str):
        return cell
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell


def _fault(value: Any) -> str:
    """Returns why the loss cannot be given a value; empty if it can."""
    if value is None:
        return "is null, not a number"
    if not isinstance(value, int | float):
        return f"contains {format_value(value)}, not a number"
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        holds = f"fp32, in which the loss is given it, has all integers up to {LARGEST_INTEGER:,}"
        return f"contains {format_value(value)}, but {holds}"
    if not math.isfinite(value) or abs(value) > LARGEST:
        return f"contains {value}, which is not a finite number of fp32"
    return ""
