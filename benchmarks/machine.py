"""What a measurement was taken on, and how busy that was with other things."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmtrain.run_dir import environment

BUSY_CORES = 0.15
"""Cores that others may use: a measurement on a machine that does more is refused."""
LOOK_S = 3.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def facts() -> dict[str, Any]:
    """Hardware, versions, commit and load, as JSON values."""
    found = environment()
    commit = found["git"] or {"commit": None, "modified": None}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit["commit"],
        "modified": commit["modified"],
        "hardware": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": _gpus(),
            "system": platform.platform(),
        },
        "versions": {"python": found["python"], **found["packages"]},
        "variables": found["variables"],
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def busy_cores(seconds: float = LOOK_S) -> float:
    """Cores in use, on average over so many seconds from now on."""
    meter = Meter()
    time.sleep(seconds)
    return meter.cores_of_others()


class Meter:
    """How many cores this process and its children did not use, and others did."""

    def __init__(self) -> None:
        self._started, self._all, self._own = time.monotonic(), _busy_s(), _own_s()

    def cores_of_others(self) -> float:
        """Since this object was made; children count once they have ended."""
        others = _busy_s() - self._all - (_own_s() - self._own)
        return max(0.0, others / (time.monotonic() - self._started))


def _busy_s() -> float:
    """Seconds of all cores together in which they did not idle, since the machine was started."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) * TICK_S


def _own_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _cpu_model() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return listed.stdout.strip().splitlines() if listed.returncode == 0 else []
