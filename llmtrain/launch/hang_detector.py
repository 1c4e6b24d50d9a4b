"""Detects child processes that a signal has stopped and nothing continues. Their watchers may be stopped too."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from llmtrain.errors import Problem, WorkerError
from llmtrain.launch.failure import HANG
from llmtrain.recipe import WatchdogConfig
from llmtrain.system.host import process_fields

STOPPED_STATES = {"T": "stopped by a signal (SIGSTOP)", "t": "held by a debugger"}
"""States of a process that only continues if another process lets it."""
CHECK_INTERVAL_S = 1.0
GRACE_S = 10.0
"""Additional seconds for a rank's own watcher to end it first, since it knows more."""
DEFAULT_TIMEOUT_S = WatchdogConfig().min_seconds
"""Timeout in seconds for a child whose recipe is not known."""


def process_state(pid: int) -> str:
    """Returns the state of a process as a letter of `/proc/PID/stat`, or an empty string if it has ended."""
    with suppress(OSError, IndexError):
        state = process_fields(pid)[0]
        return "" if state in "ZX" else state
    return ""


class HangDetector:
    """Ends a job if one of its processes is stopped for too long.

    Only time in which this process runs is counted: a job that is suspended as a whole is not ended.
    """

    def __init__(self, hang_timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """hang_timeout_s: the recipe's `watchdog.min_seconds`; 0 disables the check."""
        self._timeout_s = hang_timeout_s
        self._checked_at = time.monotonic()
        self._stopped_s: dict[int, float] = {}
        self._problems: dict[int, Problem] = {}

    @property
    def stopped(self) -> list[Problem]:
        """The processes that are stopped now, or were stopped when they ended."""
        return list(self._problems.values())

    def check(self, processes: Mapping[str, int]) -> None:
        """Checks the processes; must be called at least once a second. Raises WorkerError.

        processes: process ids by name, for messages.
        """
        now = time.monotonic()
        elapsed, self._checked_at = min(now - self._checked_at, 2 * CHECK_INTERVAL_S), now
        states = {name: process_state(pid) for name, pid in processes.items()}
        stopped = {name: processes[name] for name, state in states.items() if state in STOPPED_STATES}
        self._stopped_s = {pid: self._stopped_s.get(pid, 0.0) + elapsed for pid in stopped.values()}
        fix = "it was process {}; the same command continues from the last checkpoint"
        messages = {
            name: f"{STOPPED_STATES[states[name]]} for {self._stopped_s[pid]:.0f} s" for name, pid in stopped.items()
        }
        problems = {pid: Problem(HANG, name, messages[name], fix.format(pid)) for name, pid in stopped.items()}
        self._problems = {pid: problem for pid, problem in self._problems.items() if not process_state(pid)} | problems
        expired = [
            Problem(HANG, name, f"{messages[name]}, but only {self._timeout_s:.0f} s are allowed", fix.format(pid))
            for name, pid in stopped.items()
            if self._timeout_s and self._stopped_s[pid] > self._timeout_s + GRACE_S
        ]
        if expired:
            raise WorkerError(expired)
