"""A step's time in a peer's run. Of Python's library alone: peers have environments of their own."""

import itertools
import statistics
from collections.abc import Sequence

WARM = 10
"""Steps that are left out."""


def step_seconds(ends: Sequence[float], log_every: int) -> float:
    """The median over windows as long as those that ours logs, each of which is a mean."""
    lengths = [after - before for before, after in itertools.pairwise(ends)][WARM:]
    windows = [lengths[at : at + log_every] for at in range(0, len(lengths), log_every)]
    return statistics.median(statistics.fmean(window) for window in windows)
