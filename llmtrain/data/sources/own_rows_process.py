"""Calls a user's own functions of rows: runs in a process of its own, which alone imports them.

It gets requests from `own_rows.py`, after a first one that names the functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from llmtrain.errors import Problem, RecipeError, format_value, reason
from llmtrain.recipe.own_code import import_object, source_line

BATCH_ROWS = 1000
BATCH_CHARACTERS = 1_000_000
CHECKED_ROWS = 100
"""Number of first rows for which functions are called twice."""
TEXT = "text"
"""Column of the text in the row of a text."""
REPEAT = "must give the same result for the same argument, since its results are stored and several processes call it"

Verdict = tuple[str, Any]
"""What becomes of a row: `kept` as it is, `filtered`, `mapped` to a list of rows, or `faulty` with the reason."""
KEPT, FILTERED, MAPPED, FAULTY = "kept", "filtered", "mapped", "faulty"


class _Function(NamedTuple):
    """A function of the user's."""

    call: Callable[[Any], Any]
    path: str
    field: str
    """Its dotted recipe field."""
    folder: str | None

    @classmethod
    def of(cls, code: dict[str, Any], name: str) -> _Function | None:
        """Imports the function of a field of the source, if it is set. Raises RecipeError."""
        if (path := code["functions"].get(name)) is None:
            return None
        field = f"{code['field']}.{name}"
        return cls(import_object(path, code["folder"], field), path, field, code["folder"])

    def failed(self, error: Exception) -> str:
        """Describes an exception, with its place in the user's code."""
        return f"{source_line(error, self.folder)}{self.path} fails: {type(error).__name__}: {reason(error)}"

    def not_repeated(self, place: str, first: Any, second: Any) -> RecipeError:
        """Returns the fault of a function that gave two results."""
        message = f"{self.path} {REPEAT}; for {place} it gave {format_value(first)}, then {format_value(second)}"
        return RecipeError(Problem("data.repeats", self.field, message, "remove what is random, or kept between calls"))


def answers(requests: Iterator[Any]) -> Iterator[Any]:
    """Yields the answers to requests, of which the first is the code: its functions, their folder and the field.

    With a reader, a request is a path or name, and has answers until one is None: lists of rows, at last perhaps the
    text of a fault. Otherwise a request is a list of pairs, the place of a row and its JSON, and its answer a list of
    verdicts. Raises RecipeError for functions that do not repeat their first results.
    """
    code = next(requests)
    if reader := _Function.of(code, "reader"):
        for number, name in enumerate(requests):
            yield from _read(reader, name, is_checked=not number)
            yield None
        return
    keep, change = _Function.of(code, "filter"), _Function.of(code, "map")
    for number, rows in enumerate(requests):
        if code["is_first"] and not number:
            _check_verdicts(rows[:CHECKED_ROWS], keep, change)
        yield [_verdict(row, keep, change) for _, row in rows]


def _read(reader: _Function, name: str, is_checked: bool) -> Iterator[Any]:
    """Yields what the reader reads, in lists of rows; after a fault, its text."""
    size = 0
    batch: list[Any] = []
    number = 0
    try:
        if is_checked:
            _check_rows(reader, name)
        for number, row in enumerate(reader.call(name), start=1):
            text, fault = _row_text(row)
            if fault:
                yield batch
                yield f"{reader.path} yields {fault} as row {number:,} of '{name}'"
                return
            batch.append(row if isinstance(row, dict) else {TEXT: row})
            size += len(text)
            if len(batch) >= BATCH_ROWS or size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    except RecipeError:
        raise
    except Exception as error:
        yield batch
        yield f"{reader.failed(error)}, after {number:,} rows of '{name}'"
        return
    yield batch


def _row_text(row: Any) -> tuple[str, str]:
    """Returns a row as JSON, and what is wrong with it: empty if it can be read."""
    if not isinstance(row, dict | str):
        return "", f"{format_value(row)}, which is neither a row (dict) nor a text"
    try:
        return json.dumps(row, ensure_ascii=False), ""
    except (TypeError, ValueError, RecursionError) as error:
        return "", f"{format_value(row)}, which is not JSON data ({reason(error)})"


def _check_rows(reader: _Function, name: str) -> None:
    first, second = (_first_rows(reader, name) for _ in range(2))
    if len(first) != len(second):
        raise reader.not_repeated(f"'{name}'", f"{len(first)} rows", f"{len(second)} rows")
    for number, (row, again) in enumerate(zip(first, second, strict=True), start=1):
        if _row_text(row)[0] != _row_text(again)[0]:
            raise reader.not_repeated(f"row {number} of '{name}'", row, again)


def _first_rows(reader: _Function, name: str) -> list[Any]:
    """Returns the first rows, up to an exception, which is reported when all rows are read."""
    rows: list[Any] = []
    with suppress(Exception):
        for row in islice(reader.call(name), CHECKED_ROWS):
            rows.append(row)
    return rows


def _verdict(line: str, keep: _Function | None, change: _Function | None) -> Verdict:
    """Calls the functions for a row that is JSON."""
    if keep:
        try:
            is_kept = keep.call(json.loads(line))
        except Exception as error:
            return FAULTY, keep.failed(error)
        if type(is_kept).__name__ not in ("bool", "bool_"):  # numpy's type has the second name
            return FAULTY, f"{keep.path} returns {format_value(is_kept)}, not whether to keep the row (a bool)"
        if not is_kept:
            return FILTERED, None
    if not change:
        return KEPT, None
    row = json.loads(line)
    before = json.dumps(row, ensure_ascii=False)
    try:
        result = change.call(row)
    except Exception as error:
        return FAULTY, change.failed(error)
    rows = [] if result is None else result if isinstance(result, list) else [result]
    texts = []
    for item in rows:
        if not isinstance(item, dict):
            return FAULTY, f"{change.path} returns {format_value(result)}, not a row (dict), a list of rows or None"
        text, fault = _row_text(item)
        if fault:
            return FAULTY, f"{change.path} returns {fault}"
        texts.append(text)
    return (KEPT, None) if texts == [before] else (MAPPED, rows)


def _check_verdicts(rows: list[tuple[str, str]], keep: _Function | None, change: _Function | None) -> None:
    for place, row in rows:
        first, second = (_verdict(row, keep, change) for _ in range(2))
        if json.dumps(first) != json.dumps(second):
            of_filter = change is None or FILTERED in (first[0], second[0])
            function = keep if of_filter else change
            assert function is not None
            raise function.not_repeated(place, *(verdict[1] or verdict[0] for verdict in (first, second)))
