"""A rank's heartbeat: a page of memory that it shares with its watcher.

A beat is a handful of stores to that page, well under a microsecond each: no system call, no lock, no device. Reading
it needs no cooperation of the rank, so it also works for a rank that is stopped, or whose GIL is held.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, Self

BEATS_VARIABLE = "LLMTRAIN_BEATS"
"""File descriptor of the pages of all workers of the launcher, which reads them after the workers' end."""
RECENT = 1000
"""Number of step times for the running p99."""
WARM_STEPS = 2
"""First steps of a start, in which kernels are compiled, caches filled, and ZeRO-3 records the order of modules."""

WORD = 8
# Words of a page.
_STEP, _PHASE, _BEAT, _WAITING, _OWN_S, _MEASURED, _TIMES, _SLOW_RANK, _SLOW_RATIO, _NAMED, _ADDRESS = range(11)
_TEXT, _RING = 16, 64
_TEXT_BYTES = (_RING - _TEXT) * WORD
PAGE_BYTES = 16384  # whole pages of the kernel's, and room for RECENT


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

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class WorkTimer(Protocol):
    """Measures how long this rank works in a step, without waiting for others."""

    def begin(self) -> None:
        """Marks the beginning of a step."""

    def end(self, data_wait_s: float) -> float:
        """Returns the seconds that the rank worked in this step, including waiting for data."""


class Heartbeat:
    """The state that a rank reports about itself while it trains."""

    def __init__(self, memory: mmap.mmap | None = None, offset: int = 0) -> None:
        """memory: contains the page, at `offset`; without it the rank is not watched."""
        memory = mmap.mmap(-1, PAGE_BYTES) if memory is None else memory
        page = memoryview(memory)[offset : offset + PAGE_BYTES]
        self._numbers, self._reals, self._bytes = page.cast("q"), page.cast("d"), page
        self.work_timer: WorkTimer | None = None
        """Set once the engine exists."""
        self._begun: float | None = None
        self._steps = 0
        self._reported = 0
        self._beat(Phase.LOADING)

    @classmethod
    def of_worker(cls, rank: int) -> Self:
        """Uses the page that the launcher has created for this worker, else a new one."""
        descriptor = os.environ.pop(BEATS_VARIABLE, None)
        if descriptor is None:
            return cls()
        memory = mmap.mmap(int(descriptor), 0)
        os.close(int(descriptor))
        return cls(memory, rank * PAGE_BYTES)

    def begin_step(self, step: int) -> None:
        """Marks the beginning of step `step`."""
        self._end_of_step()
        self._numbers[_STEP] = step
        self._steps += 1
        self._beat(Phase.FIRST_STEPS if self._steps <= WARM_STEPS else Phase.TRAINING)
        self._begun = time.monotonic() if self._steps > WARM_STEPS else None
        if self.work_timer is not None:
            self.work_timer.begin()

    def end_step(self, data_wait_s: float) -> None:
        """Marks that the step has been submitted. data_wait_s: seconds that it waited for its data."""
        if self.work_timer is not None and self._steps > WARM_STEPS:
            self._reals[_OWN_S] += self.work_timer.end(data_wait_s)
            self._numbers[_MEASURED] += 1
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
        self._reals[_BEAT] = time.monotonic()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Marks that something is compiled within a phase: a step may then take as long as the first ones."""
        phase = self._numbers[_PHASE]
        self._beat(Phase.FIRST_STEPS if phase == Phase.TRAINING else Phase(phase))
        try:
            yield
        finally:
            self._beat(Phase(phase))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks that the rank waits for a device or for other ranks, which have to arrive at the same point."""
        self._numbers[_WAITING] = 1
        try:
            yield
        finally:
            self._numbers[_WAITING] = 0

    def finish(self) -> None:
        """Marks that no steps will follow."""
        self._beat(Phase.FINISHING)

    def done(self) -> None:
        """Marks that no other rank waits for this one any more."""
        self._beat(Phase.DONE)

    def set_address(self, address: str) -> None:
        """Stores the address at which the watchers of all ranks meet."""
        encoded = address.encode()
        if len(encoded) > _TEXT_BYTES:
            raise ValueError(f"an address of {len(encoded)} bytes")
        self._bytes[_TEXT * WORD : _TEXT * WORD + len(encoded)] = encoded
        self._numbers[_ADDRESS] = len(encoded)

    def slowest(self) -> tuple[int, float] | None:
        """Returns the slowest rank recently, and the ratio of its time to the median rank's, or None if unknown."""
        ratio = self._reals[_SLOW_RATIO]
        return (self._numbers[_SLOW_RANK], ratio) if ratio else None

    def straggler(self) -> tuple[int, float] | None:
        """Returns the same as `slowest`, once for each time that the watcher found it too slow, else None."""
        named = self._numbers[_NAMED]
        if named == self._reported:
            return None
        self._reported = named
        return self.slowest()

    def reader(self) -> HeartbeatReader:
        """Returns a reader of this page."""
        return HeartbeatReader(self._bytes)

    def _beat(self, phase: Phase) -> None:
        self._numbers[_PHASE] = phase
        self._reals[_BEAT] = time.monotonic()

    def _end_of_step(self) -> None:
        """Records the duration of the last step, including the logging after it."""
        if self._begun is not None:
            count = self._numbers[_TIMES]
            self._reals[_RING + count % RECENT] = time.monotonic() - self._begun
            self._numbers[_TIMES] = count + 1
            self._begun = None


@dataclass(frozen=True)
class Pulse:
    """The content of a page."""

    step: int
    """The last step that was begun; 0 before the first."""
    phase: Phase
    beat: float
    """Time of the last beat by `time.monotonic`, which is the same for all processes of a machine."""
    waiting: bool
    own_s: float
    """Seconds that `measured` steps took, without waiting for others."""
    measured: int


class HeartbeatReader:
    """Reads a heartbeat in another process."""

    def __init__(self, page: memoryview) -> None:
        self._numbers, self._reals, self._bytes = page.cast("q"), page.cast("d"), page

    def read(self) -> Pulse:
        """Returns the current content."""
        return Pulse(
            step=self._numbers[_STEP],
            phase=Phase(self._numbers[_PHASE]),
            beat=self._reals[_BEAT],
            waiting=bool(self._numbers[_WAITING]),
            own_s=self._reals[_OWN_S],
            measured=self._numbers[_MEASURED],
        )

    def p99(self) -> float:
        """Returns the 99th percentile of the last `RECENT` step times in seconds; 0 without any."""
        times = sorted(self._reals[_RING : _RING + min(self._numbers[_TIMES], RECENT)])
        return times[math.ceil(0.99 * len(times)) - 1] if times else 0.0

    def address(self) -> str | None:
        """Returns the address of `set_address`, or None."""
        length = self._numbers[_ADDRESS]
        return bytes(self._bytes[_TEXT * WORD : _TEXT * WORD + length]).decode() if length else None

    def set_slowest(self, rank: int, ratio: float, is_named: bool) -> None:
        """Stores what `slowest` and, if `is_named`, `straggler` return from now on."""
        self._numbers[_SLOW_RANK], self._reals[_SLOW_RATIO] = rank, ratio
        self._numbers[_NAMED] += is_named


class HeartbeatPages:
    """The pages of all workers of one machine, created by their launcher."""

    def __init__(self, workers: int) -> None:
        self.descriptor = os.memfd_create("llmtrain-beats")
        """For the workers to inherit, which find it by `environment`."""
        os.ftruncate(self.descriptor, workers * PAGE_BYTES)
        self._memory = mmap.mmap(self.descriptor, 0)
        page = memoryview(self._memory)
        self._readers = [HeartbeatReader(page[rank * PAGE_BYTES : (rank + 1) * PAGE_BYTES]) for rank in range(workers)]

    @property
    def environment(self) -> Mapping[str, str]:
        """The variable that passes the descriptor to the workers."""
        return {BEATS_VARIABLE: str(self.descriptor)}

    def step(self) -> int:
        """Returns the last step that all workers have begun; 0 if one of them has begun none."""
        return min(reader.read().step for reader in self._readers)

    def has_begun(self) -> bool:
        """Whether any of the workers has begun a step."""
        return any(reader.read().step for reader in self._readers)

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.descriptor)
