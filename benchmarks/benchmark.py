"""A benchmark: the commands to compare, the aims, and the presentation of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.pairs import Case, Side

Result = dict[str, Any]
"""The content of `results/NAME.json`."""


@dataclass(frozen=True)
class Verdict:
    """An aim, and whether a result meets it."""

    aim: str
    found: str
    met: bool


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that runs commands alternately."""

    name: str
    title: str
    description: str
    """A paragraph that explains what is compared and how."""
    cases: Callable[[bool], Sequence[Case]]
    """Returns the cases of the whole measurement. If the argument is true, returns those of a short one, which only
    shows that everything runs."""
    columns: dict[str, tuple[str, str]]
    """Columns of the table: name of a number → heading and format."""
    verdicts: Callable[[Result], Sequence[Verdict]]
    minutes: int
    """Approximate duration of the whole measurement on two cores."""
    pairs: int = 5
    """Number of runs of each side that a result needs."""
    in_turns: bool = False
    """Whether the sides of a case run at the same time, in turns (`benchmarks.turns`)."""


@dataclass(frozen=True)
class Script:
    """A benchmark that runs a separate program."""

    name: str
    title: str
    description: str
    command: Sequence[str]
    verdicts: Callable[[Result], Sequence[Verdict]]
    minutes: int
    needs_gpu: bool = False
    prints_result: bool = False
    """Whether the program prints its JSON instead of writing `results/NAME.json` itself."""


def case_of(result: Result, name: str) -> Result:
    """Returns a case of a result."""
    found: Result = next(case for case in result["cases"] if case["name"] == name)
    return found


def median_of(case: Result, side: str, number: str) -> float:
    """Returns the median of a number for one side of a case."""
    found = next(one for one in case["sides"] if one["name"] == side)
    return float(found["summary"][number]["median"])


def program(name: str, *words: str) -> list[str]:
    """Returns the command of one of `benchmarks/programs`."""
    return ["python", "-m", f"benchmarks.programs.{name}", *words]


def script(ranks: int, *words: str) -> list[str]:
    """Returns the command that runs a script on each of some ranks."""
    start = ["python"] if ranks == 1 else ["python", "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    return [*start, *words]


def sets(*fields: str) -> list[str]:
    """Returns the command-line options that set these fields."""
    return [part for field in fields for part in ("--set", field)]


def tuned(options: Sequence[str], ranks: int = 1, recipe: str = "recipes/tiny.py") -> Side:
    """Returns the command that measures kernels, so that `auto` takes them from the cache."""
    return Side("tune", ["python", "-m", "llmtrain", "tune", recipe, "--nproc", str(ranks), *options])
