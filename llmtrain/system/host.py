"""The memory and cores of this machine that a process may use, and their use by other processes."""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections.abc import MutableMapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

from llmtrain.system.untrusted import expanded

BUSY_CORES = 0.15
"""Cores that others may use during a measurement: the background load of a small machine."""
BUSY_SHARE = 0.01
"""The same limit as a fraction of the cores, for a larger machine with more background load."""
MISSING_CORES = 0.5
"""Number of missing cores from which on waiting threads sleep instead of spinning."""
LOOK_S = 0.3
"""Seconds for which the load by others is measured when a run starts."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SPIN_COUNT = 10_000
"""Turns of GNU OpenMP's loop in which a thread waits for the others before it sleeps; the default is 300,000, which
takes milliseconds. If another process occupies the core of one thread, all the others would otherwise waste their cores
on waiting instead of giving it one (`docs/design/decisions.md`). The number of threads, and thus the results of a run,
stay the same."""

MAX_WORKERS = 1024
"""The largest number of workers on one machine."""
ROUNDED_MIB = 64
"""Size up to which blocks of pinned memory are still rounded up; equal sizes are easier to use again."""
CGROUP_ROOT, PROCESS_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""The tree of control groups, and the file with those of this process."""


def cache_root() -> Path:
    """Returns `$LLMTRAIN_CACHE`, else `~/.cache/llmtrain`; with a `~` if this home directory is unknown."""
    return expanded(os.environ.get("LLMTRAIN_CACHE") or "~/.cache/llmtrain")


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor_field(field: str) -> str:
    """Returns a field of the first core in /proc/cpuinfo; empty if it is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(rf"^{field}\s*: (.*)$", lines, re.MULTILINE)
    return found[1] if found else ""


def processor_name() -> str:
    """Returns the processor's name, family and model; in a virtual machine several kinds may have one name."""
    name = processor_field("model name") or platform.machine()
    kind = [f"{field} {processor_field(of)}" for field, of in (("family", "cpu family"), ("model", "model"))]
    return f"{name} ({', '.join(kind)})" if processor_field("cpu family") else name


def memory_bytes() -> int:
    """Returns the memory of the whole machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limit() -> int | None:
    """Returns the bytes that the control groups of this process grant, or None without a limit.

    In a container, the container's own group is the root of the visible tree. Slurm and systemd limit the group of the
    process, or a group between it and the root (cgroups(7)).
    """
    try:
        groups = PROCESS_CGROUP.read_text(errors="replace").splitlines()
    except OSError:
        return None
    path = next((line.removeprefix("0::/") for line in groups if line.startswith("0::/")), "")
    limits = []
    for group in (CGROUP_ROOT / path, *(CGROUP_ROOT / parent for parent in Path(path).parents)):
        with suppress(OSError):
            limits.append((group / "memory.max").read_text().strip())
    return min((int(limit) for limit in limits if limit.isdecimal()), default=None)


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Limits the spinning of OpenMP's threads to `SPIN_COUNT`, unless the user has set it.

    The variable is read when torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def bound_pinned_memory(environment: MutableMapping[str, str]) -> None:
    """Makes torch allocate large blocks of pinned memory in their own size, unless the user configures its allocators.

    By default they are rounded up to powers of two, so that offloaded states may take twice the host memory that a plan
    counts. The variable is read when torch is loaded; a version before 2.13 may not know the setting, and would fail.
    """
    major, minor = metadata.version("torch").split(".")[:2]
    is_set = any(name in environment for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if not is_set and (int(major), int(minor)) >= (2, 13):
        environment["PYTORCH_ALLOC_CONF"] = f"pinned_max_round_threshold_mb:{ROUNDED_MIB}"


def stop_spinning_on_busy_cores(environment: MutableMapping[str, str], ranks: int) -> str | None:
    """Sets GOMP_SPINCOUNT=0 if other processes use the cores now, so that waiting threads sleep at once.

    Does nothing if the user has set it.

    ranks: number of ranks to start on this host. Returns a line on what was done, or None.
    """
    named = environment.get("OMP_NUM_THREADS", "")
    threads = int(named) if named.isdecimal() else available_cores() // ranks
    if threads <= 1 or environment.get("GOMP_SPINCOUNT") != str(SPIN_COUNT):
        return None
    others = cores_used_by_others(LOOK_S)
    if not is_short_of_cores(others, ranks * threads):
        return None
    environment["GOMP_SPINCOUNT"] = "0"
    return f"{busy(others, available_cores())}: threads sleep while they wait for each other (GOMP_SPINCOUNT=0)"


def is_short_of_cores(others: float, threads: int) -> bool:
    """Whether there are too few cores for `threads` threads while other processes use `others` of them."""
    return others + threads - available_cores() >= MISSING_CORES


class CoreMeter:
    """Measures how much other processes use this process's cores. Its children do not count as others."""

    def __init__(self, of_launcher: bool = False) -> None:
        """of_launcher: whether to exclude also the parent of this process and everything that it has started."""
        self._cpu_s = partial(_tree_s, os.getppid()) if of_launcher else _cpu_s
        self._started, self._all, self._own = time.monotonic(), _busy_s(), self._cpu_s()

    @property
    def seconds(self) -> float:
        """Seconds since this object was created."""
        return time.monotonic() - self._started

    def cores_used_by_others(self) -> float:
        """Returns the cores used by others on average since this object was created.

        Children count once they have ended.
        """
        others = _busy_s() - self._all - (self._cpu_s() - self._own)
        return max(0.0, others / self.seconds)


def cores_used_by_others(seconds: float) -> float:
    """Sleeps, and returns the number of cores that others used meanwhile, on average."""
    meter = CoreMeter()
    time.sleep(seconds)
    return meter.cores_used_by_others()


def available_cores() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def max_cores_used_by_others(cores: int) -> float:
    """Returns how many of `cores` others may use during a measurement that is kept."""
    return max(BUSY_CORES, BUSY_SHARE * cores)


def process_fields(pid: int) -> list[str]:
    """Returns the fields of `/proc/PID/stat` from the state on. The name before it may contain any bytes.

    Raises OSError if there is no such process.
    """
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def process_state(pid: int) -> str:
    """Returns the state of a process as a letter of `/proc/PID/stat`, or an empty string if it has ended."""
    with suppress(OSError, IndexError):
        state = process_fields(pid)[0]
        return "" if state in "ZX" else state
    return ""


def busy(others: float, cores: int) -> str:
    """Describes the load by others for people."""
    return f"others use {others:.2f} of {cores} cores"


def _busy_s() -> float:
    """Returns the total time in seconds for which the cores of this process were busy since the machine was started."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    ticks = 0
    for name, *fields in lines:
        if name in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks * TICK_S


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _tree_s(root: int) -> float:
    """Returns the CPU seconds of a process and all its descendants, including ended ones."""
    import psutil

    process, seconds = psutil.Process(root), 0.0
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            times = member.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
