"""Children that a signal has stopped, and that nobody lets go on. Their own watchers may stand still as well."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from llmtrain.errors import Problem, WorkerError
from llmtrain.recipe import WatchdogConfig

RULE = "worker.hang"
HALTED = {"T": "stopped by a signal (SIGSTOP)", "t": "held by a debugger"}
"""States of a process that goes on only if somebody lets it."""
LOOK_S = 1.0
LATER_S = 10.0
"""A rank's own watcher ends it first, if it can: it knows more."""
ALLOWED_S = WatchdogConfig().min_seconds
"""Of a child whose recipe is not known."""


def process_state(pid: int) -> str:
    """Of a process, a letter as in `/proc/PID/stat`; empty once it is over."""
    with suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "" if state in "ZX" else state
    return ""


class Standstill:
    """Ends a job one of whose processes stands still for too long.

    Only time in which this process looks is counted: a job that is suspended as a whole may take as long as it likes.
    """

    def __init__(self, allowed_s: float = ALLOWED_S) -> None:
        """allowed_s: the recipe's `watchdog.min_seconds`; 0: any time."""
        self._allowed_s = allowed_s
        self._looked = time.monotonic()
        self._stopped_s: dict[int, float] = {}
        self._seen: dict[int, Problem] = {}

    @property
    def still(self) -> list[Problem]:
        """What stands still, however short, or did so until it ended."""
        return list(self._seen.values())

    def look(self, processes: Mapping[str, int]) -> None:
        """To be called at least once a second. Raises WorkerError. processes: ids, by what messages call them."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * LOOK_S), now
        states = {name: process_state(pid) for name, pid in processes.items()}
        halted = {name: processes[name] for name, state in states.items() if state in HALTED}
        self._stopped_s = {pid: self._stopped_s.get(pid, 0.0) + passed for pid in halted.values()}
        fix = "it was process {}; the same command continues from the last checkpoint"
        told = {name: f"{HALTED[states[name]]} for {self._stopped_s[pid]:.0f} s" for name, pid in halted.items()}
        seen = {pid: Problem(RULE, name, told[name], fix.format(pid)) for name, pid in halted.items()}
        self._seen = {pid: problem for pid, problem in self._seen.items() if not process_state(pid)} | seen
        late = [
            Problem(RULE, name, f"{told[name]}, where {self._allowed_s:.0f} s are allowed", fix.format(pid))
            for name, pid in halted.items()
            if self._allowed_s and self._stopped_s[pid] > self._allowed_s + LATER_S
        ]
        if late:
            raise WorkerError(late)
