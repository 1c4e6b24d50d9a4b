"""How fast a run trains: windows of steps, tokens per second, MFU, when it ends, and whether others use its cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llmtrain.plan.draft import COMPUTE_DTYPE
from llmtrain.plan.plan import Plan
from llmtrain.system.host import SPIN_COUNT, CoreMeter, available_cores, busy, is_short_of_cores


@dataclass(frozen=True)
class Window:
    """The steps between two lines of the metrics."""

    steps: int
    seconds: float
    """Wall time of the steps only, without evaluations and checkpoints between them."""
    tokens: int
    """Tokens trained on, over all devices."""
    data_wait_s: float
    """The part of `seconds` in which rank 0 waited for data."""
    save_blocked_s: float = 0.0
    """Seconds between these steps in which checkpoints blocked training; not included in `seconds`."""


class Meter:
    """Counts steps in windows.

    Devices run ahead of the host, so a window must end where the host has waited for them, as it does when it reads the
    loss.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open()

    def _open(self) -> None:
        self._started = self._clock()
        self._paused_s = 0.0
        self._steps = self._tokens = 0
        self._data_wait_s = 0.0
        self._save_blocked_s = 0.0

    def add(self, tokens: int, data_wait_s: float) -> None:
        """Counts one step. tokens: over all devices; data_wait_s: seconds spent waiting for its data."""
        self._steps += 1
        self._tokens += tokens
        self._data_wait_s += data_wait_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of the block, for example an evaluation."""
        started = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - started

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Excludes the time of a save, and counts how long it blocked training."""
        before = self._paused_s
        try:
            with self.paused():
                yield
        finally:
            self._save_blocked_s += self._paused_s - before

    def close(self) -> Window:
        """Returns the window since the last one and begins the next. Raises ValueError if no step was counted."""
        if not self._steps:
            raise ValueError("a window without a step has no step time")
        seconds = self._clock() - self._started - self._paused_s
        window = Window(self._steps, seconds, self._tokens, self._data_wait_s, self._save_blocked_s)
        self._open()
        return window


@dataclass(frozen=True)
class Rates:
    """Speed over a window, with the FLOP convention of `Plan.flops_per_token`."""

    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    """Model TFLOP/s of one device, without recomputation."""
    mfu: float | None
    """Fraction of the device's dense peak; None if that is unknown."""


def rates(plan: Plan, window: Window) -> Rates:
    """Returns the speed of a window under a plan."""
    per_second = window.tokens / window.seconds
    per_device = per_second / plan.cluster.world_size
    flops = plan.flops_per_token * per_device
    peak = plan.cluster.spec.peak_flops.get(COMPUTE_DTYPE[plan.recipe.parallel.precision])
    return Rates(per_second, per_device, flops / 1e12, flops / peak if peak else None)


LOOK_S = 5.0
"""Minimum number of seconds between checks."""


class BusyCores:
    """Reports once that other processes use cores which the threads of a run need."""

    def __init__(self, ranks: int, threads: int) -> None:
        """ranks: number of ranks on this host. threads: number of threads of each."""
        self._threads, self._all_threads, self._is_reported = threads, ranks * threads, False
        self._meter = CoreMeter(of_launcher=True)

    def line(self) -> str | None:
        """Returns a line to print now, or None."""
        if self._is_reported or self._meter.seconds < LOOK_S:
            return None
        others = self._meter.cores_used_by_others()
        self._meter = CoreMeter(of_launcher=True)
        if not is_short_of_cores(others, self._all_threads):
            return None
        self._is_reported = True
        used, threads = busy(others, available_cores()), self._all_threads
        line = f"{used}; this run computes with {threads} threads, so it is slower than on an idle machine"
        if self._threads == 1 or os.environ.get("GOMP_SPINCOUNT") != str(SPIN_COUNT):
            return line
        return (
            f"{line}, perhaps much slower, because its threads wait for each other. Stop the run and "
            "continue it: its threads then sleep while they wait, and the results do not change. --set "
            "kernels.threads=1 may be faster still"
        )


class Forecast:
    """Predicts when a run ends, and how much it costs.

    It extrapolates the wall time so far, with the evaluations, samples and saves between the steps.
    """

    def __init__(
        self,
        devices: int,
        last_step: int,
        price: float | None = None,
        device_hours: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """price: of one hour of one device. device_hours: those that the run has used before."""
        self._devices, self._last_step, self._price = devices, last_step, price
        self._device_hours = device_hours
        self._clock = clock
        self._started = clock()
        self._first: tuple[int, float] | None = None
        """The first logged step, and when it was logged. Steps before it include compilation and allocation."""

    def after(self, step: int, step_time_s: float) -> dict[str, float]:
        """Returns the forecast for the record of `step`. step_time_s: of the last steps alone."""
        now = self._clock()
        per_step = step_time_s
        if self._first is None:
            self._first = step, now
        elif step > self._first[0]:
            per_step = (now - self._first[1]) / (step - self._first[0])
        left_s = max(0, self._last_step - step) * per_step
        hours = self._device_hours + self._devices * (now - self._started) / 3600
        forecast = {"left_s": left_s, "device_hours": hours}
        if self._price is not None:
            forecast["cost"] = self._price * hours
            forecast["cost_at_end"] = self._price * (hours + self._devices * left_s / 3600)
        return forecast
