"""Builds the device, once for each version of torch and of its sources."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from filelock import FileLock

FOLDER = Path(__file__).parent
TORCH = "2.13.0"  # whose private parts this device is written for
MODULE = "_cuda_on_host"


def cannot_build() -> str | None:
    """Why there can be no device here."""
    return None if shutil.which("g++") else "no g++, which builds the device for tests"


def build() -> Path:
    """The folder of the two libraries."""
    version = importlib.metadata.version("torch")
    if version.split("+")[0] != TORCH:
        raise RuntimeError(
            f"tests/cuda_on_host is written for torch {TORCH}, and this is {version}: look at each thing it replaces"
        )
    sources = [FOLDER / name for name in ("order.h", "device.cpp", "nccl.cpp")]
    key = hashlib.sha256(version.encode() + sysconfig.get_platform().encode())
    for source in sources:
        key.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llmtrain" / "cuda_on_host"
    folder = cache / key.hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _compile(Path(work))
                shutil.copytree(work, folder)
    return folder


def _compile(folder: Path) -> None:
    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.origin
    torch = Path(spec.origin).parent
    common = [
        *("g++", "-O1", "-w", "-std=c++20", "-fPIC", "-shared", "-DUSE_C10D", "-DUSE_DISTRIBUTED"),
        *(f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-I{sysconfig.get_path('include')}"),
        *(f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"),
    ]
    device = [*common, str(FOLDER / "device.cpp"), "-o", "libdevice.so", "-ltorch_cpu", "-lc10"]
    # The device is loaded before torch, and is not linked here: both can be built at once.
    nccl = [*common, f"-DTORCH_EXTENSION_NAME={MODULE}", str(FOLDER / "nccl.cpp"), "-o", f"{MODULE}.so"]
    nccl += ["-ltorch_cpu", "-lc10", "-ltorch_python", "-Wl,--allow-shlib-undefined"]
    started = [subprocess.Popen(c, cwd=folder, stderr=subprocess.PIPE, text=True) for c in (device, nccl)]
    for process in started:
        _, said = process.communicate()
        if process.returncode:
            raise RuntimeError(
                f"the device for tests cannot be built: torch's private parts may have changed\n{said[-4000:]}"
            )
