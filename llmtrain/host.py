"""What this machine lets a process use, and what others use of it."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

BUSY_CORES = 0.15
"""Cores that others may use beside a measurement: what a system does by itself, on a machine of few cores."""
BUSY_SHARE = 0.01
"""The same, of the cores of a larger machine, which does more by itself."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def memory_bytes() -> int:
    """Of the whole machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limit() -> int | None:
    """Bytes that the control group grants; None without a limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(limit) if limit.isdecimal() else None


class CoreMeter:
    """How much others use of the cores that this process may run on: others than itself and its children."""

    def __init__(self) -> None:
        self._started, self._all, self._own = time.monotonic(), _busy_s(), _own_s()

    def cores_of_others(self) -> float:
        """On average since this object was made; children count once they have ended."""
        others = _busy_s() - self._all - (_own_s() - self._own)
        return max(0.0, others / (time.monotonic() - self._started))


def own_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0))


def most_cores_of_others(cores: int) -> float:
    """What others may use of so many cores beside a measurement that is worth keeping."""
    return max(BUSY_CORES, BUSY_SHARE * cores)


def _busy_s() -> float:
    """Seconds in which those cores did not idle, together, since the machine was started."""
    own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    ticks = 0
    for name, *fields in lines:
        if name in own:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks * TICK_S


def _own_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)
