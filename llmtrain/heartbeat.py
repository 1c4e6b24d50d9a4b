"""A rank's heartbeat: a page of memory that it shares with who watches it.

A beat is a handful of stores into that page, well under a microsecond each: no system call, no lock, no
device. Who reads it needs nothing of the rank, so a rank that is stopped, or whose GIL is held, is read as well.
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
"""File descriptor of the pages of all workers of a launcher of ours, which reads them after their end."""
RECENT = 1000
"""Step times that the running p99 is taken of."""
WARM_STEPS = 2
"""First steps of a start, in which kernels are compiled, caches filled, and ZeRO-3 learns what comes when."""

WORD = 8
# Words of a page.
_STEP, _PHASE, _BEAT, _WAITING, _OWN_S, _MEASURED, _TIMES, _SLOW_RANK, _SLOW_RATIO, _NAMED, _ADDRESS = range(11)
_TEXT, _RING = 16, 64
_TEXT_BYTES = (_RING - _TEXT) * WORD
PAGE_BYTES = 16384  # whole pages of the kernel's, and room for RECENT


class Phase(IntEnum):
    """What a rank does."""

    LOADING = 0
    """Preparing data, starting engines, reading a checkpoint; takes as long as it takes."""
    FIRST_STEPS = 1
    """The first `WARM_STEPS` steps, and what a later one compiles."""
    TRAINING = 2
    """A step."""
    BETWEEN = 3
    """Between two steps: rank 0 logs, the others wait for its word whether to stop."""
    EVALUATING = 4
    SAVING = 5
    FINISHING = 6
    """After the last step and the last save: closing trackers, leaving the process group."""
    DONE = 7
    """Nothing is left that another rank waits for."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class OwnTime(Protocol):
    """Measures how long this rank works in a step, waiting for others left out."""

    def begin(self) -> None:
        """A step begins."""

    def end(self, data_wait_s: float) -> float:
        """Seconds that the rank worked in this step, those included in which it waited for data."""


class Heartbeat:
    """What a rank says of itself while it trains."""

    def __init__(self, memory: mmap.mmap | None = None, offset: int = 0) -> None:
        """memory: holds the page, at `offset`; without it nobody watches."""
        memory = mmap.mmap(-1, PAGE_BYTES) if memory is None else memory
        page = memoryview(memory)[offset : offset + PAGE_BYTES]
        self._numbers, self._reals, self._bytes = page.cast("q"), page.cast("d"), page
        self.own: OwnTime | None = None
        """Set by who knows the engine."""
        self._begun: float | None = None
        self._steps = 0
        self._told = 0
        self._beat(Phase.LOADING)

    @classmethod
    def of_worker(cls, rank: int) -> Self:
        """On the page that a launcher of ours has made for this worker; else on a new one."""
        descriptor = os.environ.pop(BEATS_VARIABLE, None)
        if descriptor is None:
            return cls()
        memory = mmap.mmap(int(descriptor), 0)
        os.close(int(descriptor))
        return cls(memory, rank * PAGE_BYTES)

    def begin_step(self, step: int) -> None:
        """Step `step` begins."""
        self._end_of_step()
        self._numbers[_STEP] = step
        self._steps += 1
        self._beat(Phase.FIRST_STEPS if self._steps <= WARM_STEPS else Phase.TRAINING)
        self._begun = time.monotonic() if self._steps > WARM_STEPS else None
        if self.own is not None:
            self.own.begin()

    def end_step(self, data_wait_s: float) -> None:
        """The step is submitted. data_wait_s: seconds that it waited for its data."""
        if self.own is not None and self._steps > WARM_STEPS:
            self._reals[_OWN_S] += self.own.end(data_wait_s)
            self._numbers[_MEASURED] += 1
        if self._steps >= WARM_STEPS:
            self._beat(Phase.BETWEEN)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Something else than a step, with a limit of its own."""
        self._end_of_step()
        self._beat(phase)
        try:
            yield
        finally:
            self._beat(Phase.BETWEEN)

    def beat(self) -> None:
        """The phase goes on."""
        self._reals[_BEAT] = time.monotonic()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Something is compiled in the midst of a phase: a step may take as long as the first ones."""
        phase = self._numbers[_PHASE]
        self._beat(Phase.FIRST_STEPS if phase == Phase.TRAINING else Phase(phase))
        try:
            yield
        finally:
            self._beat(Phase(phase))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Waits for a device or for other ranks: it has arrived where they have to."""
        self._numbers[_WAITING] = 1
        try:
            yield
        finally:
            self._numbers[_WAITING] = 0

    def finish(self) -> None:
        """There will be no step any more."""
        self._beat(Phase.FINISHING)

    def done(self) -> None:
        """Nobody waits for this rank any more."""
        self._beat(Phase.DONE)

    def tell_address(self, address: str) -> None:
        """Where the watchers of all ranks meet."""
        encoded = address.encode()
        if len(encoded) > _TEXT_BYTES:
            raise ValueError(f"an address of {len(encoded)} bytes")
        self._bytes[_TEXT * WORD : _TEXT * WORD + len(encoded)] = encoded
        self._numbers[_ADDRESS] = len(encoded)

    def slowest(self) -> tuple[int, float] | None:
        """The slowest rank of late, and how many times the median rank's time it needs; None where unknown."""
        ratio = self._reals[_SLOW_RATIO]
        return (self._numbers[_SLOW_RANK], ratio) if ratio else None

    def straggler(self) -> tuple[int, float] | None:
        """As `slowest`, once each time that the watcher has found it too slow."""
        named = self._numbers[_NAMED]
        if named == self._told:
            return None
        self._told = named
        return self.slowest()

    def reader(self) -> Reader:
        """Reads this page."""
        return Reader(self._bytes)

    def _beat(self, phase: Phase) -> None:
        self._numbers[_PHASE] = phase
        self._reals[_BEAT] = time.monotonic()

    def _end_of_step(self) -> None:
        """Takes down how long the last step took, with the logging after it."""
        if self._begun is not None:
            count = self._numbers[_TIMES]
            self._reals[_RING + count % RECENT] = time.monotonic() - self._begun
            self._numbers[_TIMES] = count + 1
            self._begun = None


@dataclass(frozen=True)
class Pulse:
    """What a page says."""

    step: int
    """The last one that was begun; 0 before the first."""
    phase: Phase
    beat: float
    """Time of the last beat, as `time.monotonic` counts, the same for all processes of a machine."""
    waiting: bool
    own_s: float
    """Seconds that `measured` steps took, waiting for others left out."""
    measured: int


class Reader:
    """Reads a heartbeat in another process than the one that beats."""

    def __init__(self, page: memoryview) -> None:
        self._numbers, self._reals, self._bytes = page.cast("q"), page.cast("d"), page

    def read(self) -> Pulse:
        """Now."""
        return Pulse(
            step=self._numbers[_STEP],
            phase=Phase(self._numbers[_PHASE]),
            beat=self._reals[_BEAT],
            waiting=bool(self._numbers[_WAITING]),
            own_s=self._reals[_OWN_S],
            measured=self._numbers[_MEASURED],
        )

    def p99(self) -> float:
        """Seconds that 99 of 100 of the last `RECENT` steps stayed below; 0 where there are none."""
        times = sorted(self._reals[_RING : _RING + min(self._numbers[_TIMES], RECENT)])
        return times[math.ceil(0.99 * len(times)) - 1] if times else 0.0

    def address(self) -> str | None:
        """What `tell_address` told."""
        length = self._numbers[_ADDRESS]
        return bytes(self._bytes[_TEXT * WORD : _TEXT * WORD + length]).decode() if length else None

    def tell_slowest(self, rank: int, ratio: float, is_named: bool) -> None:
        """What `slowest` and, where it `is_named`, `straggler` answer from now on."""
        self._numbers[_SLOW_RANK], self._reals[_SLOW_RATIO] = rank, ratio
        self._numbers[_NAMED] += is_named


class Board:
    """The pages of all workers of one machine, made by their launcher."""

    def __init__(self, workers: int) -> None:
        self._descriptor = os.memfd_create("llmtrain-beats")
        os.ftruncate(self._descriptor, workers * PAGE_BYTES)
        self._memory = mmap.mmap(self._descriptor, 0)
        page = memoryview(self._memory)
        self._readers = [Reader(page[rank * PAGE_BYTES : (rank + 1) * PAGE_BYTES]) for rank in range(workers)]

    @property
    def descriptor(self) -> int:
        """To be inherited by the workers, which find it by `environment`."""
        return self._descriptor

    @property
    def environment(self) -> Mapping[str, str]:
        """What tells the workers of it."""
        return {BEATS_VARIABLE: str(self._descriptor)}

    def step(self) -> int:
        """The step that the last of the workers has begun; 0 where one of them never came to one."""
        return min(reader.read().step for reader in self._readers)

    def has_begun(self) -> bool:
        """Whether any of the workers has begun a step."""
        return any(reader.read().step for reader in self._readers)

    def close(self) -> None:
        """Lets go of the descriptor."""
        os.close(self._descriptor)
