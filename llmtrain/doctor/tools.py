"""Compilers, and programs that start workers on other hosts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from llmtrain.doctor.finding import Finding, ok, warning
from llmtrain.doctor.scene import Scene, ask
from llmtrain.launch.disks import has_libaio

STALE_S = 600
"""Seconds after which a lock in the folder of compiled operators is stale: the slowest takes a few minutes."""
LAUNCHERS = {"ssh": "openssh-client", "pdsh": "pdsh", "mpirun": "openmpi-bin", "sbatch": "slurm-client"}


def compilers(scene: Scene) -> Iterator[Finding]:
    """Checks the programs that compile DeepSpeed's operators and torch.compile's code."""
    compiler = shlex.split(scene.env.get("CXX", "c++"))[0]
    told = []
    for name, program, arguments, fix in (
        ("C++ compiler", compiler, ("--version",), "apt install g++, or dnf install gcc-c++"),
        ("ninja", "ninja", ("--version",), "pip install ninja"),
    ):
        answer = ask(program, *arguments)
        if answer.refusal:
            text = f"no {name}: {answer.refusal}; offload to disk and torch.compile need it"
            yield warning(f"tools.{name.split()[-1]}", text, fix)
        else:
            first = answer.text.splitlines()[0]
            told.append(first if first.startswith(program) else f"{program} {first}")
    nvcc = ask("nvcc", "--version")
    release = re.search(r"release ([\d.]+)", nvcc.text)
    told.append(f"nvcc {release[1]}" if release else nvcc.refusal or "the release of nvcc is unknown")
    yield ok("tools.compilers", "; ".join(told))
    if release:
        yield from _mismatch(release[1])
    lib = "libaio was found" if has_libaio() else "libaio was not found; only offload to disk (nvme) needs it"
    yield ok("tools.libaio", lib)


def _mismatch(nvcc: str) -> Iterator[Finding]:
    """Reports different major versions of CUDA, for which DeepSpeed compiles no CUDA code."""
    try:
        import torch

        built = torch.version.cuda
    except Exception:  # another check reports that torch cannot be imported
        return
    if built and built.partition(".")[0] != nvcc.partition(".")[0]:
        text = f"nvcc has CUDA {nvcc}, but torch {built}: DeepSpeed compiles nothing for GPUs"
        yield warning("tools.nvcc", text, f"install nvcc of CUDA {built} and set CUDA_HOME to it")


def operators(scene: Scene) -> Iterator[Finding]:
    """Lists compiled operators, and reports locks of an interrupted build, for which torch waits forever."""
    root = extensions_root(scene)
    there = sorted(file.parent.name for file in root.glob("**/*.so"))
    yield ok("tools.operators", f"compiled operators in {root}: {', '.join(there) or 'none'}")
    now = time.time()
    for lock in root.glob("**/lock"):
        age = now - lock.stat().st_mtime
        if age > STALE_S:
            text = f"{lock} is {age / 3600:.1f} h old: a build was interrupted, and every start waits for it"
            yield warning("tools.lock", text, f"rm {shlex.quote(str(lock))}")


def launchers(scene: Scene) -> Iterator[Finding]:
    """Lists the programs that start workers on other hosts."""
    there = [name for name in LAUNCHERS if shutil.which(name)]
    absent = [f"{name} ({package})" for name, package in LAUNCHERS.items() if name not in there]
    told = [f"launchers: {', '.join(there) or 'none'}"]
    yield ok("tools.launchers", "; ".join([*told, *([f"not installed: {', '.join(absent)}"] if absent else [])]))
    beside = Path(sys.executable).parent / "deepspeed"
    if not os.access(beside, os.X_OK):
        text = f"{beside} does not exist, but --launcher deepspeed needs it"
        yield warning("tools.deepspeed", text, "pip install -c constraints.txt -e .")


def extensions_root(scene: Scene) -> Path:
    """Returns the folder in which torch stores what it has compiled (`torch.utils.cpp_extension`)."""
    named = scene.env.get("TORCH_EXTENSIONS_DIR")
    caches = Path(scene.env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(named) if named else caches / "torch_extensions"
