"""When a run ends, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable


class Forecast:
    """Extrapolates from the wall time of the steps so far, with the evaluations, samples and saves between them."""

    def __init__(
        self,
        devices: int,
        last_step: int,
        price: float | None = None,
        device_hours: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """price: of a device and hour. device_hours: those that the run has taken before."""
        self._devices, self._last_step, self._price = devices, last_step, price
        self._device_hours = device_hours
        self._clock = clock
        self._started = clock()
        self._first: tuple[int, float] | None = None
        """The first logged step, and when it was logged: what is before it also compiles and allocates."""

    def after(self, step: int, step_time_s: float) -> dict[str, float]:
        """Returns what a record of `step` says about it. step_time_s: of the last steps alone."""
        now = self._clock()
        per_step = step_time_s
        if self._first is None:
            self._first = step, now
        elif step > self._first[0]:
            per_step = (now - self._first[1]) / (step - self._first[0])
        left_s = max(0, self._last_step - step) * per_step
        hours = self._device_hours + self._devices * (now - self._started) / 3600
        found = {"left_s": left_s, "device_hours": hours}
        if self._price is not None:
            found["cost"] = self._price * hours
            found["cost_at_end"] = self._price * (hours + self._devices * left_s / 3600)
        return found
