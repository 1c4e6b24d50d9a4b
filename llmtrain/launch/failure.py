"""How workers end: the error report of a worker, a JSON file next to its log, and the outcome of the job."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from llmtrain.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    Exit,
    OwnCodeError,
    Problem,
    RecipeError,
    UserError,
    WorkerError,
)
from llmtrain.run_dir import RunDir
from llmtrain.system.stops import QUIT, STOP_SIGNALS, before_the_first_step, say
from llmtrain.system.untrusted import UNREADABLE, read_json

HANG = "worker.hang"
CUT_OFF = "worker.cut_off"
"""The rule for a rank that no longer hears from rank 0. It cannot know which of the two is lost."""
USER_ERRORS = {
    kind.__name__: kind for kind in (RecipeError, DataError, CheckpointError, DivergedError, OwnCodeError, WorkerError)
}
"""The errors that a worker raises, by name."""
# Signals that kill a worker without warning, before it can write an error file. SIGABRT is not among them: libraries
# raise it on purpose, often because another worker is gone.
KILL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
TAIL_LINES = 12
TAIL_BYTES = 8192


@dataclass(frozen=True)
class Failure:
    """The exception that ended a worker."""

    rank: int
    time: float
    """Seconds since the epoch. The earliest exception among the workers is the cause, the others are consequences."""
    type: str
    """Name of the exception's class."""
    message: str
    exit_code: int
    """Exit code of the worker; the launcher passes on that of a `UserError`."""
    where: str
    """`file:line in function` of the innermost frame; empty for a `UserError`."""
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
        """`Type: message (file:line in function)`, or only the message for a `UserError`."""
        if self.problems:
            return self.message
        return f"{self.type}: {self.message}" + (f" ({self.where})" if self.where else "")

    @property
    def is_cut_off(self) -> bool:
        """Whether the rank only knows that it no longer hears from rank 0."""
        return any(problem.get("rule") == CUT_OFF for problem in self.problems)

    def error(self, log: Path) -> UserError:
        """Returns the `UserError` that the worker raised, to be raised again, or WorkerError for any other failure."""
        if not self.problems:
            return WorkerError(Problem("worker.died", f"rank {self.rank}", self.summary, f"see {log}"))
        kind = USER_ERRORS.get(self.type, UserError)
        return kind([Problem(**problem) for problem in self.problems])


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker, as seen by the process that started it."""

    rank: int
    code: int
    """As in `subprocess`: negative after a signal."""
    time: float
    """Seconds since the epoch."""
    signals: Sequence[int] = ()
    """Signals that were sent to it while it ran."""
    log_start: int = 0
    """Size of its log before it started; the part before belongs to earlier attempts."""

    @property
    def failed(self) -> bool:
        """Whether it neither finished nor stopped after saving."""
        return self.code not in (Exit.DONE, Exit.RESUME)

    @property
    def was_killed(self) -> bool:
        """Whether a signal killed it that the launcher neither sent nor caused by asking it to stop."""
        return -self.code in KILL_SIGNALS and (
            signal.SIGKILL not in self.signals if -self.code == signal.SIGKILL else not self.signals
        )

    def order(self, failure: Failure | None) -> tuple[int, float]:
        """Returns the key by which failures are ordered: the cause comes before its consequences.

        An error file has the time of the exception. A worker without one has the time of its end, which is noticed late
        on a busy machine; but a worker that was killed cannot have been brought down by another.
        """
        if self.was_killed:
            return 0, self.time
        if failure is not None:
            return 1, failure.time
        return (2 if self.signals else 1), self.time


def job_exit_code(exits: Sequence[WorkerExit], run_dir: RunDir, stopped_by: int | None) -> int:
    """Returns the exit code of a job whose workers have ended, or raises the error of the one that failed first.

    stopped_by: the signal that stopped the launcher, if one did.
    """
    failed = [worker for worker in exits if worker.failed]
    if not failed:
        return Exit.RESUME if any(worker.code == Exit.RESUME for worker in exits) else Exit.DONE
    failures = {worker.rank: Failure.read(run_dir.error_file(worker.rank)) for worker in failed}
    first = min(failed, key=lambda worker: worker.order(failures[worker.rank]))
    log = run_dir.log_file(first.rank)
    if failure := failures[first.rank]:
        raise failure.error(log)
    if stopped_by is not None and -first.code in STOP_SIGNALS:
        return exit_code_before_first_step(stopped_by)  # it did not handle signals yet
    fix = _last_lines(log, first.log_start)
    raise WorkerError(Problem("worker.died", f"rank {first.rank}", describe_exit(first.code), fix))


def exit_code_before_first_step(number: int) -> int:
    """Returns the exit code of a run that a signal ended before its first step."""
    if number == QUIT:
        return Exit.INTERRUPTED
    say(before_the_first_step(number))
    return Exit.RESUME


def clear_failures(run_dir: RunDir) -> None:
    """Removes the error files of an earlier attempt, which would be mistaken for this one's."""
    for file in run_dir.logs.glob("rank_*.error.json"):
        file.unlink(missing_ok=True)


def describe_exit(code: int) -> str:
    """Describes how a worker without an error file ended. code: as in `subprocess`, negative after a signal."""
    if code >= 0:
        return f"exited with code {code} without an error message"
    hint = "; the kernel's out-of-memory killer does this" if -code == signal.SIGKILL else ""
    # The real-time signals have no names.
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "real-time"
    return f"killed by signal {-code} ({name}){hint}"


def _last_lines(log: Path, start: int) -> str:
    """Returns the last lines of a log, after its first `start` bytes."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n    ".join([f"see {log}, which ends:", *lines[-TAIL_LINES:]]) if lines else ""
