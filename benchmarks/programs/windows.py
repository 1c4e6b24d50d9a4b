"""Reads the subject of a peer's run, and prints its speed.

It imports only Python's library, since peers have their own environments.
"""

import itertools
import json
import resource
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

WARM = 10
"""Number of steps that are excluded."""
ENDS = "ends"
"""Key of the times at which steps ended. For commands that run in turns, `time.time` returns them."""


def read(file: Path) -> SimpleNamespace:
    """Returns the values in a JSON file of `subject`."""
    return SimpleNamespace(**json.loads(file.read_text()))


def print_speed(
    ends: Sequence[float], train: SimpleNamespace, ranks: int = 1, peak_gib: float | None = None, **more: float
) -> None:
    """Prints a line of JSON with the time of a step, the speed, and the peak memory; by default, that of the host.

    The time is the median over windows as long as those that ours logs. The value of a window is its mean. ends: of
    each step, in seconds. train: the content of `train.json`. more: other numbers to print.
    """
    lengths = [after - before for before, after in itertools.pairwise(ends)][WARM:]
    windows = [lengths[at : at + train.log_every] for at in range(0, len(lengths), train.log_every)]
    step_s = statistics.median(statistics.fmean(window) for window in windows)
    tokens = train.micro_batch_size * train.accumulation * ranks * train.sequence_length
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 if peak_gib is None else peak_gib
    found = {"step_ms": step_s * 1000, "tokens_per_second": tokens / step_s, "peak_gib": peak, **more}
    print(json.dumps({**found, ENDS: list(ends)}))
