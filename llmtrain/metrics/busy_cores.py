"""Detects whether others use the cores on which the ranks of a host compute."""

from __future__ import annotations

import os

from llmtrain.host import SPIN_COUNT, CoreMeter, are_lacking, busy, own_cores

LOOK_S = 5.0
"""Least number of seconds between checks."""


class BusyCores:
    """Reports once that other processes use cores which the threads of a run need."""

    def __init__(self, ranks: int, threads: int) -> None:
        """ranks: number of ranks on this host. threads: number of threads of each."""
        self._threads, self._all_threads, self._is_told = threads, ranks * threads, False
        self._meter = CoreMeter(of_launcher=True)

    def line(self) -> str | None:
        """Returns a line to print now, or None."""
        if self._is_told or self._meter.seconds < LOOK_S:
            return None
        others = self._meter.cores_of_others()
        self._meter = CoreMeter(of_launcher=True)
        if not are_lacking(others, self._all_threads):
            return None
        self._is_told = True
        used, threads = busy(others, own_cores()), self._all_threads
        said = f"{used}; this run computes with {threads} threads, so it is slower than on an idle machine"
        if self._threads == 1 or os.environ.get("GOMP_SPINCOUNT") != str(SPIN_COUNT):
            return said
        return (
            f"{said}, perhaps much slower, because its threads wait for each other. Stop the run and "
            "continue it: its threads then sleep while they wait, and the results do not change. --set "
            "kernels.threads=1 may be faster still"
        )
