"""The error for wrong arguments or settings, and the parts of messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple

MOST_SHOWN = 200
"""Number of characters of a value that a message shows."""


class Problem(NamedTuple):
    """One fault of the arguments or the settings: rule id, option or file, message, and what to do, if that is clear.

    Faults of a configuration are a `Finding`.
    """

    rule: str
    field: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"\n    {self.fix}" if self.fix else ""
        return f"{self.field}: {self.message} [{self.rule}]{fix}"


class UsageError(Exception):
    """The arguments or the settings are wrong; no file was checked. Has all problems at once."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def printable(text: str, kept: str = "") -> str:
    """Escapes every character that a terminal or an encoding might not print as it is, except those in `kept`."""
    return "".join(sign if sign.isprintable() or sign in kept else ascii(sign)[1:-1] for sign in text)


def truncate(text: str) -> str:
    """Truncates a text for a message."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def did_you_mean(name: str, known: Iterable[str], similar: float = 0.6) -> str:
    """Returns `"; did you mean 'x'?"` for the known name closest to `name`, or an empty string.

    similar: the smallest share of characters in common.
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=similar)
    return f"; did you mean '{matches[0]}'?" if matches else ""
