"""What a case is, and what it is given. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Numbers = dict[str, Any]
"""What a case found, as JSON values."""


@dataclass(frozen=True)
class Situation:
    """What a case is given."""

    small: bool
    """Whether to use small models, which only show that everything runs."""
    work: Path
    """A folder that all cases of a call share."""
    rates: Path | None
    """A JSON file of `MeasuredRates`: the rates that the self-test has measured. None if it has not run."""


@dataclass(frozen=True)
class Case:
    """Something to measure, in a process of its own."""

    question: str
    """What it answers."""
    seconds: int
    """Approximate duration on an H100, without the imports. It is not begun with less time left."""
    measure: Callable[[Situation], Numbers]
    """Returns what was found. Raises an exception if the case fails."""
    imports: Sequence[str] = ()
    """Modules that the process imports while the case before it runs."""


class NotHereError(Exception):
    """A case has nothing to measure on this machine."""


class FailedError(Exception):
    """A case ran to its end and found that something is wrong."""

    def __init__(self, message: str, found: Numbers) -> None:
        super().__init__(message)
        self.found = found
