"""Describes the machine of a measurement, and its load by other processes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from typing import Any

from llmtrain.run_dir import environment
from llmtrain.system.host import available_cores, processor_name


def facts() -> dict[str, Any]:
    """Returns hardware, versions, commit and load as JSON values."""
    found = environment()
    commit = found["git"] or {"commit": None, "modified": None}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit["commit"],
        "modified": commit["modified"],
        "hardware": {
            "cpu": processor_name(),
            "cores": available_cores(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": _gpus(),
            "system": platform.platform(),
        },
        "versions": {"python": found["python"], **found["packages"]},
        # Each side has a cache of its own (`benchmarks.pairs`).
        "variables": {name: value for name, value in found["variables"].items() if name != "LLMTRAIN_CACHE"},
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return listed.stdout.strip().splitlines() if listed.returncode == 0 else []


def short_facts(command: str, hardware: str, *packages: str) -> dict[str, Any]:
    """Returns command, commit, hardware, and the versions of some packages, as JSON values."""
    found = environment()
    return {
        "command": command,
        "commit": (found["git"] or {}).get("commit"),
        "hardware": hardware,
        "versions": {"python": found["python"], **{name: found["packages"][name] for name in packages}},
    }
