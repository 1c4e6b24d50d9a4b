"""Errors that a user can cause, as data: the field, the value, the rule and what to do.

Every such error derives from `UserError` and carries the exit code that the command line documents. Any other exception
that escapes is a bug in llmtrain and keeps its traceback.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

FLOAT_DIGITS = 12
"""Number of digits of a float that a message shows."""
MAX_VALUE_LENGTH = 200
"""Number of characters of a value that a message shows."""
USER_OF_URL = re.compile(r"(?<=://)[^\s/?#]+(?=@)")
"""What stands before the host of a URL: a user, often with a password, or a token. It may be in logs and reports."""


class Exit(IntEnum):
    """Exit codes of every command."""

    DONE = 0
    USAGE = 2  # a wrong command line or recipe; nothing was started
    DATA = 3
    CHECKPOINT = 4
    WORKER = 5  # a worker died
    RESUME = 75  # stopped on a signal after saving, or the hub failed (EX_TEMPFAIL): run it again
    INTERRUPTED = 130  # ended at once by a second SIGINT, or by SIGQUIT


@dataclass(frozen=True)
class Problem:
    """One fault.

    rule: the id of the broken rule (`batch.divides`), stable across versions.
    field: the dotted recipe field, or the file, that is at fault.
    message: what is wrong with the value, and why; it is read after the field.
    fix: what to do about it, ready to paste where that is possible.
    """

    rule: str
    field: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"\n    {self.fix}" if self.fix else ""
        return f"{self.field}: {self.message} [{self.rule}]{fix}"

    def without_secrets(self) -> Problem:
        """Returns the problem with `…` for the user and password, or the token, of each URL."""
        texts = {name: USER_OF_URL.sub("…", getattr(self, name)) for name in ("field", "message", "fix")}
        return replace(self, **texts)

    def as_dict(self) -> dict[str, str]:
        """Returns the problem as JSON data."""
        return asdict(self)


class UserError(Exception):
    """An error with a message for people and an exit code; printed without a traceback."""

    exit_code: Exit = Exit.USAGE
    nearest: tuple[str, ...] = ()
    """Legal plans nearest to a refused one, or the cheapest ones that fit, as arguments to paste."""
    nearest_title: str = "nearest legal plans, with the same global batch"
    nearest_figures: tuple[str, ...] = ()
    """Predictions for each of them; empty without predictions."""

    def __init__(self, problems: str | Problem | Iterable[Problem]) -> None:
        if isinstance(problems, str):
            problems = Problem(rule="", field="", message=problems)
        listed = (problems,) if isinstance(problems, Problem) else problems
        self.problems = tuple(problem.without_secrets() for problem in listed)
        super().__init__(str(self))

    def __str__(self) -> str:
        return "\n".join(self._line(problem) for problem in self.problems)

    def report(self) -> str:
        """Returns the message for the user: the problems, and the nearest legal plans if there are any."""
        lines = [f"error: {self}"]
        if self.nearest:
            lines.append(f"{self.nearest_title}:")
        for plan, figures in itertools.zip_longest(self.nearest, self.nearest_figures):
            lines += [f"    {plan}", *([f"        {figures}"] if figures else [])]
        return printable("\n".join(lines), kept="\n\t")

    def as_dict(self) -> dict[str, Any]:
        """Returns the refusal as JSON data."""
        return {
            "legal": not isinstance(self, RecipeError),
            "problems": [problem.as_dict() for problem in self.problems],
            "nearest": list(self.nearest),
        }

    def _render_traceback_(self) -> list[str]:
        """Returns what IPython shows in a notebook instead of a traceback."""
        return [self.report()]

    @staticmethod
    def _line(problem: Problem) -> str:
        return str(problem) if problem.rule else problem.message


class RecipeError(UserError):
    """The command line, the recipe or the plan is wrong. All faults are reported at once."""


class FamilyError(RecipeError):
    """A split or a kernel changes what a family of models computes. Some callers treat this error as a result."""

    def __init__(self, rule: str, field: str, working: object, refused: str, reason: str) -> None:
        """working: a value of the field that works; refused: what is refused, with which the message begins."""
        self.reason = reason
        super().__init__(Problem(rule, field, f"{refused}: {reason}", f"--set {field}={working}"))


class DataError(UserError):
    """The corpus, the tokenizer or the token store cannot be used."""

    exit_code = Exit.DATA


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or belongs to another run."""

    exit_code = Exit.CHECKPOINT


class HubError(UserError):
    """The hub was not reached, or failed; what was written here is complete."""

    exit_code = Exit.RESUME


class DivergedError(UserError):
    """Training stopped because too many of its updates would have corrupted the weights."""

    exit_code = Exit.WORKER


class OwnCodeError(UserError):
    """Code of the user's own failed while the run called it."""

    exit_code = Exit.WORKER


class StoppedError(UserError):
    """A signal ended a run, which has reported this; the same call continues the run."""

    def __init__(self, code: int, run_dir: object) -> None:
        """code: RESUME if everything is saved, INTERRUPTED if it ended at once."""
        self.exit_code = Exit(code)
        how = "saved its state" if code == Exit.RESUME else "ended at once"
        super().__init__(
            Problem("run.stopped", str(run_dir), f"a signal stopped the run, which {how}", "start it again")
        )


class WorkerError(UserError):
    """A worker process died."""

    exit_code = Exit.WORKER


def printable(text: str, kept: str = "") -> str:
    """Escapes every character that a terminal or an encoding might not print as it is, except those in `kept`."""
    return "".join(
        character if character.isprintable() or character in kept else ascii(character)[1:-1] for character in text
    )


def abbreviate(names: Sequence[str], limit: int = 5) -> str:
    """Returns the first few of some names, and how many more there are, for a message."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def did_you_mean(name: str, known: Iterable[str], similar: float = 0.6) -> str:
    """Returns `"; did you mean 'x'?"` for the known name closest to `name`, or an empty string.

    similar: the smallest share of characters in common.
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=similar)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def format_value(value: object) -> str:
    """Formats a value for a message: on one line, and truncated; a float without the last digits of its rounding."""
    try:
        if isinstance(value, float) and len(repr(value)) > FLOAT_DIGITS:
            return f"{value:.{FLOAT_DIGITS}g}"
        return truncate(repr(value))
    except Exception:  # nesting beyond the interpreter's limit, an integer with thousands of digits, a faulty __repr__
        return f"a value of type {type(value).__name__}"


def truncate(text: str) -> str:
    """Truncates a text for a message."""
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"


def reason(error: BaseException) -> str:
    """Returns the message of an error on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(truncate(str(error)).split()) or "it gives no reason"
