"""Detects child processes that a signal has stopped and nothing continues. Their watchers may be stopped too."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from llmtrain.errors import Problem, WorkerError
from llmtrain.launch.failure import HANG
from llmtrain.recipe import WatchdogConfig
from llmtrain.system.host import process_fields

HALTED = {"T": "stopped by a signal (SIGSTOP)", "t": "held by a debugger"}
"""States of a process that only continues if another process lets it."""
LOOK_S = 1.0
LATER_S = 10.0
"""Additional seconds for a rank's own watcher to end it first, since it knows more."""
ALLOWED_S = WatchdogConfig().min_seconds
"""Seconds allowed for a child whose recipe is not known."""


def process_state(pid: int) -> str:
    """Returns the state of a process as a letter of `/proc/PID/stat`, or an empty string if it has ended."""
    with suppress(OSError, IndexError):
        state = process_fields(pid)[0]
        return "" if state in "ZX" else state
    return ""


class Standstill:
    """Ends a job if one of its processes is stopped for too long.

    Only time in which this process runs is counted: a job that is suspended as a whole is not ended.
    """

    def __init__(self, allowed_s: float = ALLOWED_S) -> None:
        """allowed_s: the recipe's `watchdog.min_seconds`; 0 allows any time."""
        self._allowed_s = allowed_s
        self._looked = time.monotonic()
        self._stopped_s: dict[int, float] = {}
        self._seen: dict[int, Problem] = {}

    @property
    def still(self) -> list[Problem]:
        """The processes that are stopped now, or were stopped when they ended."""
        return list(self._seen.values())

    def look(self, processes: Mapping[str, int]) -> None:
        """Checks the processes; must be called at least once a second. Raises WorkerError.

        processes: process ids by name, for messages.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * LOOK_S), now
        states = {name: process_state(pid) for name, pid in processes.items()}
        halted = {name: processes[name] for name, state in states.items() if state in HALTED}
        self._stopped_s = {pid: self._stopped_s.get(pid, 0.0) + passed for pid in halted.values()}
        fix = "it was process {}; the same command continues from the last checkpoint"
        described = {name: f"{HALTED[states[name]]} for {self._stopped_s[pid]:.0f} s" for name, pid in halted.items()}
        seen = {pid: Problem(HANG, name, described[name], fix.format(pid)) for name, pid in halted.items()}
        self._seen = {pid: problem for pid, problem in self._seen.items() if not process_state(pid)} | seen
        late = [
            Problem(HANG, name, f"{described[name]}, but only {self._allowed_s:.0f} s are allowed", fix.format(pid))
            for name, pid in halted.items()
            if self._allowed_s and self._stopped_s[pid] > self._allowed_s + LATER_S
        ]
        if late:
            raise WorkerError(late)
