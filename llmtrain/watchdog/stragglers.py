"""Which rank is slower than the others; pure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

WINDOW_S = 5.0
"""Least time that ranks are compared over."""
WINDOW_STEPS = 5
"""Fewest steps that ranks are compared over."""
IN_A_ROW = 2
"""Windows that a rank is slow in before it is named: once may be anything."""
QUIET_S = 300.0
"""Time in which the same rank is not named again."""


@dataclass(frozen=True)
class Slowest:
    """The slowest rank of a window."""

    rank: int
    ratio: float
    """Its own time per step in those of the median rank of its stage."""
    is_named: bool
    """Whether it is to be told of."""


class Stragglers:
    """Compares the time that ranks need themselves, window by window.

    Only ranks of one pipeline stage are compared, since stages differ by design. Of an even number of ranks the
    median is the faster one of the two in the middle: of two ranks, the faster.
    """

    def __init__(self, ratio: float, stages: Mapping[int, int], clock: Callable[[], float] = time.monotonic) -> None:
        """ratio: from which a rank is named; 0: never. stages: of each rank, the stage."""
        self._ratio = ratio
        self._stages = stages
        self._clock = clock
        self._since = clock()
        self._base: dict[int, tuple[float, int]] = {}
        self._suspect: tuple[int, int] = -1, 0
        self._quiet_until: dict[int, float] = {}

    def seen(self, totals: Mapping[int, tuple[float, int]]) -> Slowest | None:
        """The slowest rank, where a window ends here.

        totals: of each rank the seconds and the steps that it has measured since it began.
        """
        if not self._base:
            self._open(totals)
        if self._clock() - self._since < WINDOW_S or totals.keys() != self._base.keys():
            return None
        steps = {rank: count - self._base[rank][1] for rank, (_, count) in totals.items()}
        if min(steps.values()) < WINDOW_STEPS:
            return None
        own = {rank: (seconds - self._base[rank][0]) / steps[rank] for rank, (seconds, _) in totals.items()}
        self._open(totals)
        ratios = {rank: own[rank] / median for rank in own if (median := self._median(own, rank)) > 0}
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
