"""A rank's heartbeat: a page of memory that it shares with its watcher.

A beat is a handful of stores to that page, well under a microsecond each: no system call, no lock, no device. Reading
it needs no cooperation of the rank, so it also works for a rank that is stopped, or whose GIL is held.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Protocol, Self

BEATS_VARIABLE = "LLMTRAIN_BEATS"
"""File descriptor of the pages of all workers of the launcher, which reads them after the workers' end."""
RECENT = 1000
"""Number of step times for the running p99."""
WARM_STEPS = 2
"""First steps of a start, in which kernels are compiled, caches filled, and ZeRO-3 records the order of modules."""


class Phase(IntEnum):
    """The current activity of a rank."""

    LOADING = 0
    """Preparing data, starting engines, reading a checkpoint; has no time limit."""
    FIRST_STEPS = 1
    """The first `WARM_STEPS` steps, and compilation in a later one."""
    TRAINING = 2
    """A step."""
    BETWEEN = 3
    """Between two steps: rank 0 logs, and the others wait for its verdict on stopping."""
    EVALUATING = 4
    SAVING = 5
    FINISHING = 6
    """After the last step and the last save: closing trackers, leaving the process group."""
    DONE = 7
    """Nothing is left for which another rank waits."""
    CALLBACKS = 8
    """Between two steps, in the recipe's callbacks."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class WorkTimer(Protocol):
    """Measures how long this rank works in a step, without waiting for others."""

    def begin(self) -> None:
        """Marks the beginning of a step."""

    def end(self, data_wait_s: float) -> float:
        """Returns the seconds that the rank worked in this step, including waiting for data."""


class HeartbeatPage(ctypes.Structure):
    """The shared memory of a rank. The rank writes all of it but the slowest rank, which rank 0's watcher writes."""

    _fields_ = (
        ("step", ctypes.c_int64),  # the last one that was begun; 0 before the first
        ("phase", ctypes.c_int64),
        ("beat", ctypes.c_double),  # time of the last beat by `time.monotonic`, the same for all processes of a machine
        ("waiting", ctypes.c_int64),
        ("work_s", ctypes.c_double),  # seconds that `measured_steps` steps took, without waiting for others
        ("measured_steps", ctypes.c_int64),
        ("num_step_times", ctypes.c_int64),
        ("step_times", ctypes.c_double * RECENT),  # a ring buffer of seconds
        ("slowest_rank", ctypes.c_int64),
        ("slowest_ratio", ctypes.c_double),
        ("straggler_reports", ctypes.c_int64),  # how often the watcher found the slowest rank too slow
        ("address", ctypes.c_char * 256),  # at which the watchers of all ranks meet
        ("has_address", ctypes.c_int64),
    )

    @classmethod
    def new(cls) -> Self:
        """Returns a page in memory that forked processes share."""
        return cls.from_buffer(mmap.mmap(-1, ctypes.sizeof(cls)))

    @classmethod
    def of_rank(cls, memory: mmap.mmap, local_rank: int) -> Self:
        """Returns a page of `HeartbeatPages`."""
        return cls.from_buffer(memory, local_rank * ctypes.sizeof(cls))

    def p99(self) -> float:
        """Returns the 99th percentile of the last `RECENT` step times in seconds; 0 without any."""
        times = sorted(self.step_times[: min(self.num_step_times, RECENT)])
        return times[math.ceil(0.99 * len(times)) - 1] if times else 0.0


class Heartbeat:
    """The state that a rank reports about itself while it trains."""

    def __init__(self, page: HeartbeatPage | None = None) -> None:
        """page: by default a new one, which only a forked watcher shares."""
        self.page = page or HeartbeatPage.new()
        self.work_timer: WorkTimer | None = None
        """Set once the engine exists."""
        self._begun: float | None = None
        self._steps = 0
        self._reported = 0
        self._beat(Phase.LOADING)

    @classmethod
    def of_worker(cls, local_rank: int) -> Self:
        """Uses the page that the launcher has created for this worker, else a new one."""
        descriptor = os.environ.pop(BEATS_VARIABLE, None)
        if descriptor is None:
            return cls()
        memory = mmap.mmap(int(descriptor), 0)
        os.close(int(descriptor))
        return cls(HeartbeatPage.of_rank(memory, local_rank))

    def begin_step(self, step: int) -> None:
        """Marks the beginning of step `step`."""
        self._end_of_step()
        self.page.step = step
        self._steps += 1
        self._beat(Phase.FIRST_STEPS if self._steps <= WARM_STEPS else Phase.TRAINING)
        self._begun = time.monotonic() if self._steps > WARM_STEPS else None
        if self.work_timer is not None:
            self.work_timer.begin()

    def end_step(self, data_wait_s: float) -> None:
        """Marks that the step has been submitted. data_wait_s: seconds that it waited for its data."""
        if self.work_timer is not None and self._steps > WARM_STEPS:
            self.page.work_s += self.work_timer.end(data_wait_s)
            self.page.measured_steps += 1
        if self._steps >= WARM_STEPS:
            self._beat(Phase.BETWEEN)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Marks a phase other than a step, with a time limit of its own."""
        self._end_of_step()
        self._beat(phase)
        try:
            yield
        finally:
            self._beat(Phase.BETWEEN)

    def beat(self) -> None:
        """Marks progress within the phase."""
        self.page.beat = time.monotonic()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Marks that something is compiled within a phase: a step may then take as long as the first ones."""
        phase = self.page.phase
        self._beat(Phase.FIRST_STEPS if phase == Phase.TRAINING else phase)
        try:
            yield
        finally:
            self._beat(phase)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks that the rank waits for a device or for other ranks, which have to arrive at the same point."""
        self.page.waiting = 1
        try:
            yield
        finally:
            self.page.waiting = 0

    def finish(self) -> None:
        """Marks that no steps will follow."""
        self._beat(Phase.FINISHING)

    def done(self) -> None:
        """Marks that no other rank waits for this one any more."""
        self._beat(Phase.DONE)

    def set_address(self, address: str) -> None:
        """Stores the address at which the watchers of all ranks meet. Raises ValueError if it is too long."""
        self.page.address = address.encode()
        self.page.has_address = 1  # not before all of it is there

    def slowest(self) -> tuple[int, float] | None:
        """Returns the slowest rank recently, and the ratio of its time to the median rank's, or None if unknown."""
        ratio = self.page.slowest_ratio
        return (self.page.slowest_rank, ratio) if ratio else None

    def straggler(self) -> tuple[int, float] | None:
        """Returns the same as `slowest`, once for each time that the watcher found it too slow, else None."""
        reports = self.page.straggler_reports
        if reports == self._reported:
            return None
        self._reported = reports
        return self.slowest()

    def _beat(self, phase: int) -> None:
        self.page.phase = phase
        self.page.beat = time.monotonic()

    def _end_of_step(self) -> None:
        """Records the duration of the last step, including the logging after it."""
        if self._begun is not None:
            self.page.step_times[self.page.num_step_times % RECENT] = time.monotonic() - self._begun
            self.page.num_step_times += 1
            self._begun = None


class HeartbeatPages:
    """The pages of all workers of one machine, created by their launcher."""

    def __init__(self, workers: int) -> None:
        self.descriptor = os.memfd_create("llmtrain-beats")
        """For the workers to inherit, which find it by `environment`."""
        os.ftruncate(self.descriptor, workers * ctypes.sizeof(HeartbeatPage))
        memory = mmap.mmap(self.descriptor, 0)
        self._pages = [HeartbeatPage.of_rank(memory, rank) for rank in range(workers)]

    @property
    def environment(self) -> Mapping[str, str]:
        """The variable that passes the descriptor to the workers."""
        return {BEATS_VARIABLE: str(self.descriptor)}

    def step(self) -> int:
        """Returns the last step that all workers have begun; 0 if one of them has begun none."""
        return min(int(page.step) for page in self._pages)

    def has_begun(self) -> bool:
        """Whether any of the workers has begun a step."""
        return any(page.step for page in self._pages)

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.descriptor)
