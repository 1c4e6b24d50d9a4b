"""Resolves a version or a range to the known release of DeepSpeed for which files are checked."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from llmtrain_lint.errors import Problem, UsageError, printable, truncate
from llmtrain_lint.schema import Version, releases, version

_OPERATORS: dict[str, Callable[[Version, Version], bool]] = {
    "==": operator.eq,
    "": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_NUMBER = r"(\d{1,6}(?:\.\d{1,6}){0,3})"
_CLAUSE = re.compile(rf"\s*(==|!=|<=|>=|<|>|~=|)\s*{_NUMBER}(\.\*)?\s*", re.ASCII)
_INSTALLED = re.compile(rf"{_NUMBER}(?!\d)", re.ASCII)


@dataclass(frozen=True)
class Release:
    """A release that is known, and why it was chosen."""

    deepspeed: str
    why: str


@cache
def choose_release(requested: str | None = None) -> Release:
    """Returns the newest known release that fits a version, or a range such as `>=0.17,<0.19`.

    By default, it is the installed one, or the newest known. If none fits, it is the nearest known.

    Raises UsageError if the text is neither a version nor a range, or if no version can fit it.
    """
    known = [one["deepspeed"] for one in releases()]
    if requested is None:
        found = _INSTALLED.match(_installed_version())
        if found is None:
            return Release(known[0], "the newest known")
        installed = found[1]
        near = _nearest(version(installed), known)
        return Release(near, "installed" if near == installed else f"the nearest known to the installed {installed}")
    clauses = [_CLAUSE.fullmatch(clause) for clause in requested.split(",")]
    if len(requested) > 100 or not all(clauses):
        message = f"{truncate(printable(requested))!r} is neither a version nor a range"
        fix = "a version such as 0.18.4, or a range such as '>=0.17,<0.19'"
        raise UsageError(Problem("lint.deepspeed", "--deepspeed", message, fix))
    given = [(found[1], version(found[2]), bool(found[3])) for found in clauses if found]

    def fits(one: Version) -> bool:
        return all(_fits(one, *clause) for clause in given)

    fitting = next((one for one in known if fits(version(one))), None)
    exact = len(given) == 1 and given[0][0] in ("", "==") and not given[0][2]
    if fitting:
        return Release(fitting, "as asked" if exact else f"the newest known that fits {requested.strip()}")
    unknown = next((one for one in ((0,), *(number for _, number, _ in given), (10**6,)) if fits(one)), None)
    if unknown is None:
        raise UsageError(Problem("lint.deepspeed", "--deepspeed", f"no version fits {requested.strip()!r}"))
    return Release(_nearest(unknown, known), f"the nearest known to {requested.strip()}")


def _installed_version() -> str:
    """Returns the version of the installed DeepSpeed, or an empty text."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return ""


def _fits(one: Version, sign: str, number: Version, any_last: bool) -> bool:
    if sign == "~=":  # at least this one, and the same but for the last number
        return _cut(one, 4) >= _cut(number, 4) and one[: len(number) - 1] == number[:-1]
    if any_last:
        return _OPERATORS[sign](_cut(one, len(number)), number)
    return _OPERATORS[sign](_cut(one, 4), _cut(number, 4))


def _cut(one: Version, length: int) -> Version:
    return (*one, 0, 0, 0, 0)[:length]


def _nearest(wanted: Version, known: list[str]) -> str:
    """Returns the newest known release that is not later, or else the oldest."""
    return next((one for one in known if version(one) <= wanted), known[-1])
