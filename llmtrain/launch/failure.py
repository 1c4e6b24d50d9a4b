"""The error report of a worker to its launcher: a small JSON file next to its log."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from llmtrain.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    Exit,
    Problem,
    RecipeError,
    UserError,
    WorkerError,
)
from llmtrain.system.untrusted import UNREADABLE, read_json

HANG = "worker.hang"
CUT_OFF = "worker.cut_off"
"""The rule for a rank that no longer hears from rank 0. It cannot know which of the two is lost."""
USER_ERRORS = {kind.__name__: kind for kind in (RecipeError, DataError, CheckpointError, DivergedError, WorkerError)}
"""The errors that a worker raises, by name."""


@dataclass(frozen=True)
class Failure:
    """The exception that ended a worker."""

    rank: int
    time: float
    """Seconds since the epoch. The earliest failure among the workers is the cause, the others are consequences."""
    type: str
    """Name of the exception's class."""
    message: str
    exit_code: int
    """Exit code of the worker; the launcher passes on that of a `UserError`."""
    where: str
    """`file:line in function` of the innermost frame; empty for a user's mistake."""
    traceback: str
    problems: tuple[dict[str, str], ...] = ()
    """The problems of a `UserError`, as dictionaries; empty for any other exception."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Self:
        """Returns the failure that describes `error`."""
        frames = traceback.extract_tb(error.__traceback__)
        user = error if isinstance(error, UserError) else None
        return cls(
            rank=rank,
            time=time.time(),
            type=type(error).__name__,
            message=str(error),
            exit_code=user.exit_code if user else Exit.WORKER,
            where="" if user or not frames else f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}",
            traceback="".join(traceback.format_exception(error)),
            problems=tuple(problem.as_dict() for problem in user.problems) if user else (),
        )

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Reads a failure from a file. Returns None if the worker wrote none, or was killed while writing it."""
        try:
            return read_json(path, cls)
        except UNREADABLE:
            return None

    def write(self, path: Path) -> None:
        """Writes the file that `read` reads."""
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")

    @property
    def summary(self) -> str:
        """`Type: message (file:line in function)`, or only the message for a user's mistake."""
        if self.problems:
            return self.message
        return f"{self.type}: {self.message}" + (f" ({self.where})" if self.where else "")

    @property
    def is_cut_off(self) -> bool:
        """Whether the rank only knows that it no longer hears from rank 0."""
        return any(problem.get("rule") == CUT_OFF for problem in self.problems)

    def user_error(self) -> UserError | None:
        """Returns the `UserError` that the worker raised, to be raised again, or None for any other failure."""
        if not self.problems:
            return None
        kind = USER_ERRORS.get(self.type, UserError)
        return kind([Problem(**problem) for problem in self.problems])
