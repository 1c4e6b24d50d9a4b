"""Determines which rank is slower than the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

WINDOW_S = 5.0
"""Minimum time in seconds over which ranks are compared."""
WINDOW_STEPS = 5
"""Minimum number of steps over which ranks are compared."""
IN_A_ROW = 2
"""Number of windows in which a rank must be slow to be reported, since a single one may be chance."""
QUIET_S = 300.0
"""Seconds in which the same rank is not reported again."""


@dataclass(frozen=True)
class Slowest:
    """The slowest rank of a window."""

    rank: int
    ratio: float
    """Its own time per step, relative to that of the median rank of its stage."""
    is_named: bool
    """Whether to report it."""


class Stragglers:
    """Compares the time that ranks need for their own work, window by window.

    Only ranks of the same pipeline stage are compared, since stages differ by design. For an even number of ranks the
    median is the faster one of the two in the middle: of two ranks, the faster.
    """

    def __init__(self, ratio: float, stages: Mapping[int, int], clock: Callable[[], float] = time.monotonic) -> None:
        """ratio: the one from which a rank is reported; 0: never. stages: rank → pipeline stage."""
        self._ratio = ratio
        self._stages = stages
        self._clock = clock
        self._since = clock()
        self._base: dict[int, tuple[float, int]] = {}
        self._suspect: tuple[int, int] = -1, 0
        self._quiet_until: dict[int, float] = {}

    def update(self, totals: Mapping[int, tuple[float, int]]) -> Slowest | None:
        """Returns the slowest rank if a window ends here, else None.

        totals: rank → the seconds and the steps that it has measured since its beginning.
        """
        if not self._base:
            self._open(totals)
        if self._clock() - self._since < WINDOW_S or totals.keys() != self._base.keys():
            return None
        steps = {rank: count - self._base[rank][1] for rank, (_, count) in totals.items()}
        if min(steps.values()) < WINDOW_STEPS:
            return None
        step_seconds = {rank: (seconds - self._base[rank][0]) / steps[rank] for rank, (seconds, _) in totals.items()}
        self._open(totals)
        ratios = {
            rank: step_seconds[rank] / median
            for rank in step_seconds
            if (median := self._median(step_seconds, rank)) > 0
        }
        if not ratios:
            return None
        rank = max(ratios, key=ratios.__getitem__)
        return Slowest(rank, ratios[rank], self._is_named(rank, ratios[rank]))

    def _open(self, totals: Mapping[int, tuple[float, int]]) -> None:
        self._base, self._since = dict(totals), self._clock()

    def _median(self, own: Mapping[int, float], rank: int) -> float:
        stage = self._stages[rank]
        return statistics.median_low([seconds for other, seconds in own.items() if self._stages[other] == stage])

    def _is_named(self, rank: int, ratio: float) -> bool:
        if not self._ratio or ratio < self._ratio:
            self._suspect = -1, 0
            return False
        count = self._suspect[1] + 1 if self._suspect[0] == rank else 1
        self._suspect = rank, count
        if count < IN_A_ROW or self._clock() < self._quiet_until.get(rank, 0.0):
            return False
        self._quiet_until[rank] = self._clock() + QUIET_S
        return True
