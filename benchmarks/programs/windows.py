"""Computes a step's time in a peer's run. It imports only Python's library, since peers have their own environments."""

import itertools
import statistics
from collections.abc import Sequence

WARM = 10
"""Number of steps that are excluded."""


def step_seconds(ends: Sequence[float], log_every: int) -> float:
    """Returns the median over windows as long as those that ours logs. The value of a window is its mean."""
    lengths = [after - before for before, after in itertools.pairwise(ends)][WARM:]
    windows = [lengths[at : at + log_every] for at in range(0, len(lengths), log_every)]
    return statistics.median(statistics.fmean(window) for window in windows)
