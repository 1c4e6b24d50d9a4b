"""A question: what is measured against what, what is aimed at, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.pairs import Case

Result = dict[str, Any]
"""What lies in `results/NAME.json`."""


@dataclass(frozen=True)
class Verdict:
    """An aim, and whether a result meets it."""

    aim: str
    found: str
    met: bool


@dataclass(frozen=True)
class Question:
    """One that is answered by commands run in turn."""

    name: str
    title: str
    asks: str
    """A paragraph: what is compared, and how."""
    cases: Callable[[bool], Sequence[Case]]
    """Of a whole measurement, or, where that is asked for, of a short one that only shows that all of it runs."""
    columns: dict[str, tuple[str, str]]
    """Of the table: name of a number, and its heading and format."""
    verdicts: Callable[[Result], Sequence[Verdict]]
    minutes: int
    """What the whole measurement takes on two cores, about."""
    pairs: int = 5
    """Runs of each side that a result needs."""
    needs_gpu: bool = False


@dataclass(frozen=True)
class Script:
    """A question that a program of its own answers, from before there were pairs."""

    name: str
    title: str
    asks: str
    command: Sequence[str]
    verdicts: Callable[[Result], Sequence[Verdict]]
    minutes: int
    needs_gpu: bool = False
    prints_result: bool = False
    """Whether it prints its JSON, instead of writing `results/NAME.json` itself."""


def case_of(result: Result, name: str) -> Result:
    """A case of a result."""
    found: Result = next(case for case in result["cases"] if case["name"] == name)
    return found


def median_of(case: Result, side: str, number: str) -> float:
    """A number of a side of a case."""
    found = next(one for one in case["sides"] if one["name"] == side)
    return float(found["summary"][number]["median"])
