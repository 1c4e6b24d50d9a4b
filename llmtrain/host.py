"""What this machine lets a process use, and what others use of it."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import MutableMapping
from contextlib import suppress
from functools import partial
from pathlib import Path

BUSY_CORES = 0.15
"""Cores that others may use beside a measurement: what a system does by itself, on a machine of few cores."""
BUSY_SHARE = 0.01
"""The same, of the cores of a larger machine, which does more by itself."""
LACKING_CORES = 0.5
"""That threads lack before anything is done about it."""
LOOK_S = 0.3
"""In which it is seen whether others use the cores, when a run starts."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SPIN_COUNT = 10_000
"""Turns of GNU OpenMP's loop in which a thread waits for the others before it sleeps; its own default is 300,000, which
is milliseconds. Where another process has the core of one thread, all the others then burn theirs instead of giving it
one (`docs/design/decisions.md`). The number of threads, and so the numbers of a run, stay the same."""


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


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Has OpenMP's threads wait for each other as `SPIN_COUNT` says, where nobody has said otherwise.

    It is read when torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def sleep_beside_others(environment: MutableMapping[str, str], ranks: int) -> str | None:
    """Has threads sleep at once when they wait, where others use their cores now and nobody has said otherwise.

    ranks: to be started on this host. A line on what was seen and done; None where nothing was.
    """
    named = environment.get("OMP_NUM_THREADS", "")
    threads = int(named) if named.isdecimal() else own_cores() // ranks
    if threads <= 1 or environment.get("GOMP_SPINCOUNT") != str(SPIN_COUNT):
        return None
    others = cores_of_others(LOOK_S)
    if not are_lacking(others, ranks * threads):
        return None
    environment["GOMP_SPINCOUNT"] = "0"
    return f"{busy(others, own_cores())}: threads sleep while they wait for each other (GOMP_SPINCOUNT=0)"


def are_lacking(others: float, threads: int) -> bool:
    """Whether so many threads lack cores, where others use so many."""
    return others + threads - own_cores() >= LACKING_CORES


class CoreMeter:
    """How much others use of the cores that this process may run on: others than itself and its children."""

    def __init__(self, of_launcher: bool = False) -> None:
        """of_launcher: the parent of this process and all that it has started are no others either, running or not."""
        self._own_s = partial(_tree_s, os.getppid()) if of_launcher else _own_s
        self._started, self._all, self._own = time.monotonic(), _busy_s(), self._own_s()

    @property
    def seconds(self) -> float:
        """Since this object was made."""
        return time.monotonic() - self._started

    def cores_of_others(self) -> float:
        """On average since this object was made; children count once they have ended."""
        others = _busy_s() - self._all - (self._own_s() - self._own)
        return max(0.0, others / self.seconds)


def cores_of_others(seconds: float) -> float:
    """That others use in the next seconds, in which this process sleeps."""
    meter = CoreMeter()
    time.sleep(seconds)
    return meter.cores_of_others()


def own_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0))


def most_cores_of_others(cores: int) -> float:
    """What others may use of so many cores beside a measurement that is worth keeping."""
    return max(BUSY_CORES, BUSY_SHARE * cores)


def busy(others: float, cores: int) -> str:
    """What others use, for people."""
    return f"others use {others:.2f} of {cores} cores"


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


def _tree_s(root: int) -> float:
    """Of a process and all that it and its children have started, with those of them that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            fields = file.read_text(errors="replace").rpartition(")")[2].split()  # from the third one on
            process = int(file.parent.name)
            parents[process], ticks[process] = int(fields[1]), sum(map(int, fields[11:15]))

    def is_below(process: int | None) -> bool:
        while process is not None and process != root:
            process = parents.get(process)
        return process == root

    return TICK_S * sum(ticks[process] for process in parents if is_below(process))
