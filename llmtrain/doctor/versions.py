"""Versions of Python and packages, compared with llmtrain's requirements."""

from __future__ import annotations

import platform
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmtrain.doctor.finding import Finding, fault, ok
from llmtrain.doctor.scene import Scene

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


def python(scene: Scene) -> Iterator[Finding]:
    """Checks the Python version, and llmtrain itself."""
    asked, _ = requirements()
    version = platform.python_version()
    own = _version("llmtrain") or "not installed, run from its folder"
    text = f"Python {version} ({sys.executable}), llmtrain {own}"
    if _satisfies(version, asked):
        yield ok("versions.python", text)
    else:
        yield fault("versions.python", f"{text}: Python {asked} is required", "create a virtual environment with it")


def packages(scene: Scene) -> Iterator[Finding]:
    """Checks every package that llmtrain depends on."""
    _, needed = requirements()
    wrong = []
    for name, asked in needed.items():
        version = _version(name)
        if version is None:
            wrong.append(f"{name} is not installed")
        elif not _satisfies(version, asked):
            wrong.append(f"{name} is {version}, but {asked} is required")
    found = ", ".join(f"{name} {version}" for name in LEADING if (version := _version(name)))
    if wrong:
        yield fault("versions.packages", "; ".join(wrong), "pip install -c constraints.txt -e .")
    if found:
        rest = "" if wrong else f"; all {len(needed)} packages satisfy the requirements"
        yield ok("versions.packages", found + rest)


def torch_build(scene: Scene) -> Iterator[Finding]:
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


def optional(scene: Scene) -> Iterator[Finding]:
    """Lists the packages that some recipes need."""
    there = [f"{dist} {_version(dist) or ''}".strip() for module, dist in OPTIONAL.items() if _is_there(module)]
    absent = [dist for module, dist in OPTIONAL.items() if not _is_there(module)]
    told = [f"optional: {', '.join(there)}"] if there else []
    told += [f"optional, not installed: {', '.join(absent)}"] if absent else []
    yield ok("versions.optional", "; ".join(told))


def requirements() -> tuple[str, dict[str, str]]:
    """Returns the required Python versions, and package → versions, from pyproject.toml or the installed package.

    Raises PackageNotFoundError if neither exists.
    """
    from packaging.requirements import Requirement

    file = Path(__file__).parents[2] / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        lines, python_versions = project["dependencies"], project["requires-python"]
    else:
        about = metadata.metadata("llmtrain")
        lines, python_versions = metadata.requires("llmtrain") or [], about["Requires-Python"]
    parsed = [Requirement(line) for line in lines]
    needed = [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return python_versions, {one.name: str(one.specifier) for one in needed}


def _satisfies(version: str, asked: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(asked).contains(version, prereleases=True)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _nccl_version() -> str:
    import torch

    nccl: Any = torch.cuda.nccl  # without types
    return "NCCL " + ".".join(map(str, nccl.version()))
