"""Checks whether a value is JSON data, which can be stored in a recipe, written to files and read again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from llmtrain.errors import shown

MOST_NESTED = 32
"""Largest depth of nested lists and objects."""
MOST_DIGITS = 40
"""Largest number of digits of an integer in `model.config`. Rules report numbers that are too large; this limit only
bounds the arithmetic."""
TOO_LARGE = f"it contains an integer of more than {MOST_DIGITS} digits"
TOO_DEEP = f"lists and objects are nested deeper than {MOST_NESTED} levels"


def json_fault(value: Any) -> str | None:
    """Returns why a value cannot be written as JSON and read again, or be used as a name, or None if it can.

    Uses no recursion, since a value may be nested deeper than the interpreter's limit.
    """
    level = [value]
    for _ in range(MOST_NESTED):
        for item in level:
            if fault := _not_a_leaf(item):
                return fault
        inner = (one for item in level for one in _within(item))
        level = [*{id(one): one for one in inner}.values()]  # once each, since a list may contain itself many times
        if not level:
            return None
    return TOO_DEEP


def _within(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return [*item, *item.values()]
    return item if isinstance(item, (list, tuple)) else ()


def _not_a_leaf(item: Any) -> str | None:
    if isinstance(item, str):
        if "\0" in item:
            return "it contains a NUL character"
        return None if item.isascii() or _is_unicode(item) else "it contains a character that is not valid Unicode"
    if isinstance(item, float):
        return None if math.isfinite(item) else f"{item} is not a finite number"
    if isinstance(item, int):
        return None if abs(item) < 10**MOST_DIGITS else TOO_LARGE
    if isinstance(item, dict):
        names = [name for name in item if not isinstance(name, str)]
        return f"{shown(names[0])} is not a name: names are strings" if names else None
    if item is None or isinstance(item, (list, tuple, BaseModel)):  # a model has checked its own fields
        return None
    return f"it contains a {type(item).__name__}, which is not JSON data"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
