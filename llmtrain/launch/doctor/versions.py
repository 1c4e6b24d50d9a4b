"""Versions of Python and packages compared with llmtrain's requirements, compilers, and programs that start workers."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmtrain.launch.disks import compiler_of, has_libaio
from llmtrain.launch.doctor.finding import Finding, HostContext, fault, ok, run_command, warning
from llmtrain.overrides import TRIED, untried_versions
from llmtrain.system.host import installed_version
from llmtrain.system.kernel_caches import kernel_caches

LEADING = ("torch", "deepspeed", "transformers", "accelerate", "datasets")
"""The packages that are always listed; the others only if something is wrong."""
OPTIONAL = {
    "flash_attn": "flash-attn",
    "liger_kernel": "liger-kernel",
    "torchao": "torchao",
    "transformer_engine": "transformer-engine",
    "horovod": "horovod",
    "wandb": "wandb",
    "mlflow": "mlflow",
}
"""Module → distribution."""


def python(context: HostContext) -> Iterator[Finding]:
    """Checks the Python version, and llmtrain itself."""
    required, _ = requirements()
    version = platform.python_version()
    llmtrain_version = installed_version("llmtrain") or "not installed, run from its folder"
    text = f"Python {version} ({sys.executable}), llmtrain {llmtrain_version}"
    if _satisfies(version, required):
        yield ok("versions.python", text)
    else:
        yield fault("versions.python", f"{text}: Python {required} is required", "create a virtual environment with it")


def packages(context: HostContext) -> Iterator[Finding]:
    """Checks every package that llmtrain depends on."""
    _, needed = requirements()
    wrong = []
    for name, required in needed.items():
        version = installed_version(name)
        if version is None:
            wrong.append(f"{name} is not installed")
        elif not _satisfies(version, required):
            wrong.append(f"{name} is {version}, but {required} is required")
    leading = ", ".join(f"{name} {version}" for name in LEADING if (version := installed_version(name)))
    if wrong:
        yield fault("versions.packages", "; ".join(wrong), "pip install -c constraints.txt -e packages/lint -e .")
    for line in untried_versions():
        package = line.partition(" ")[0]
        yield warning("versions.untested", line, f"pip install {package}=={TRIED[package]}")
    if leading:
        rest = "" if wrong else f"; all {len(needed)} packages satisfy the requirements"
        yield ok("versions.packages", leading + rest)


def torch_build(context: HostContext) -> Iterator[Finding]:
    """Checks what torch was built for, and whether it can be imported; loads it."""
    try:
        import torch
        from torch import distributed as dist
    except Exception as error:  # a library that is missing, or built for another processor
        yield fault("versions.torch", f"torch cannot be imported: {error}", "reinstall torch (see pytorch.org)")
        return
    if not dist.is_available():
        yield fault("versions.torch", "torch was built without torch.distributed", "install another build")
        return
    backends = [
        "gloo" if dist.is_gloo_available() else "",
        _nccl_version() if dist.is_nccl_available() else "no NCCL in this build of torch",
    ]
    made_for = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPUs only"
    )
    yield ok("versions.torch", f"torch built for {made_for}; {', '.join(filter(None, backends))}")
    if not dist.is_gloo_available():
        yield fault("versions.torch", "torch was built without gloo", "install another build of torch")


def optional(context: HostContext) -> Iterator[Finding]:
    """Lists the packages that some recipes need."""
    installed = [
        f"{dist} {installed_version(dist) or ''}".strip() for module, dist in OPTIONAL.items() if _is_there(module)
    ]
    absent = [dist for module, dist in OPTIONAL.items() if not _is_there(module)]
    lines = [f"optional: {', '.join(installed)}"] if installed else []
    lines += [f"optional, not installed: {', '.join(absent)}"] if absent else []
    yield ok("versions.optional", "; ".join(lines))


def requirements() -> tuple[str, dict[str, str]]:
    """Returns the required Python versions, and package → versions, from pyproject.toml or the installed package.

    Raises PackageNotFoundError if neither exists.
    """
    from packaging.requirements import Requirement

    file = Path(__file__).parents[3] / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        lines, python_versions = project["dependencies"], project["requires-python"]
    else:
        about = metadata.metadata("llmtrain")
        lines, python_versions = metadata.requires("llmtrain") or [], about["Requires-Python"]
    parsed = [Requirement(line) for line in lines]
    needed = [
        requirement
        for requirement in parsed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    return python_versions, {requirement.name: str(requirement.specifier) for requirement in needed}


def _satisfies(version: str, required: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(required).contains(version, prereleases=True)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _nccl_version() -> str:
    import torch

    nccl: Any = torch.cuda.nccl  # without types
    return "NCCL " + ".".join(map(str, nccl.version()))


STALE_S = 600
"""Seconds after which a lock in the folder of compiled operators is stale: the slowest takes a few minutes."""
LAUNCH_PROGRAMS = {"ssh": "openssh-client", "pdsh": "pdsh", "mpirun": "openmpi-bin", "sbatch": "slurm-client"}
"""Program → the package of Debian that has it."""


def compilers(context: HostContext) -> Iterator[Finding]:
    """Checks the programs that compile DeepSpeed's operators and torch.compile's code."""
    compiler = compiler_of(context.env)
    lines = []
    for name, program, arguments, fix in (
        ("C++ compiler", compiler, ("--version",), "apt install g++, or dnf install gcc-c++"),
        ("ninja", "ninja", ("--version",), "pip install ninja"),
    ):
        output = run_command(program, *arguments)
        if output.error:
            text = f"no {name}: {output.error}; offload to disk and torch.compile need it"
            yield warning(f"tools.{name.split()[-1]}", text, fix)
        else:
            first = output.text.partition("\n")[0]
            lines.append(first if first.startswith(program) else f"{program} {first}".rstrip())
    nvcc = run_command("nvcc", "--version")
    release = re.search(r"release ([\d.]+)", nvcc.text)
    lines.append(f"nvcc {release[1]}" if release else nvcc.error or "the release of nvcc is unknown")
    yield ok("tools.compilers", "; ".join(lines))
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


def operators(context: HostContext) -> Iterator[Finding]:
    """Lists compiled operators, and reports locks of an interrupted build, for which torch waits forever."""
    root = extensions_root(context)
    compiled = sorted(file.parent.name for file in root.glob("**/*.so"))
    yield ok("tools.operators", f"compiled operators in {root}: {', '.join(compiled) or 'none'}")
    now = time.time()
    for lock in root.glob("**/lock"):
        age = now - lock.stat().st_mtime
        if age > STALE_S:
            text = f"{lock} is {age / 3600:.1f} h old: a build was interrupted, and every start waits for it"
            yield warning("tools.lock", text, f"rm {shlex.quote(str(lock))}")


def launchers(context: HostContext) -> Iterator[Finding]:
    """Lists the programs that start workers on other hosts."""
    installed = [name for name in LAUNCH_PROGRAMS if shutil.which(name)]
    absent = [f"{name} ({package})" for name, package in LAUNCH_PROGRAMS.items() if name not in installed]
    lines = [f"launchers: {', '.join(installed) or 'none'}"]
    yield ok("tools.launchers", "; ".join([*lines, *([f"not installed: {', '.join(absent)}"] if absent else [])]))
    deepspeed = Path(sys.executable).parent / "deepspeed"
    if not os.access(deepspeed, os.X_OK):
        text = f"{deepspeed} does not exist, but --launcher deepspeed needs it"
        yield warning("tools.deepspeed", text, "pip install -c constraints.txt -e packages/lint -e .")


def extensions_root(context: HostContext) -> Path:
    """Returns the folder in which DeepSpeed's compiled operators are stored."""
    return kernel_caches(context.env)["TORCH_EXTENSIONS_DIR"]
