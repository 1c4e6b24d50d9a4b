"""Triton's driver for the device of this folder: kernels are compiled for its GPU and checked; none runs.

A launch compiles with Triton's own compiler and `ptxas`, as on a GPU. What CUDA's driver would say of the kernel is
read from the compiled code with `cuobjdump`, which Triton brings. `used` keeps it.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends import Backend, backends
from triton.backends.driver import GPUDriver
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.errors import OutOfResources

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")
MOST_REGISTERS = 65536
"""Of a block, as of a multiprocessor (CUDA C++ Programming Guide, technical specifications per compute capability)."""
REGISTER_UNIT = 8
"""A warp is given registers in multiples of this number for each of its threads (the same guide)."""
MOST_BLOCKS = 2**31 - 1, 65535, 65535
"""Of a grid, in each dimension (the same table)."""


@dataclass(frozen=True)
class Compiled:
    """A kernel as it was compiled for a launch."""

    name: str
    code: str
    """Digest of the compiled code: the same function is compiled anew for other types, constants and alignments."""
    warps: int
    registers: int
    """Of each thread."""
    spilled: int
    """Bytes of local memory of each thread: for registers that did not suffice, and for arrays."""
    shared: int
    """Bytes of shared memory of a block."""
    in_tf32: bool
    """Whether it multiplies matrices in TF32, which torch does not do unless it is asked to."""


used: dict[Compiled, None] = {}
"""Kernels that were loaded or launched, in this order. Of a kernel that is autotuned, all configurations are loaded."""
left_out: dict[str, None] = {}
"""Kernels with a configuration beyond the limits. Autotuning goes on with the others; without it, this is an error."""


class BeyondLimits(OutOfResources):
    """Triton's error, which autotuning expects, with the name of the kernel."""

    def __init__(self, required: int, limit: int, name: str, kernel: str = ""):
        super().__init__(required, limit, name)
        self.kernel = kernel

    def __str__(self) -> str:
        return f"the kernel {self.kernel} needs {self.required} {self.name}, and a block has at most {self.limit}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.required, self.limit, self.name, self.kernel)


class Launcher:
    """What launches a kernel: checks the size of the grid."""

    compiled: Compiled
    in_tf32 = False

    def __init__(self, source: Any, metadata: Any):
        self.name, self.warps = metadata.name, metadata.num_warps
        _check(self.name, metadata.shared, _properties()["max_shared_mem"], "bytes of shared memory")
        Driver.loading = self

    def __call__(self, *given: Any) -> None:
        grid = given[:3]
        if not all(0 < blocks <= most for blocks, most in zip(grid, MOST_BLOCKS, strict=True)):
            raise ValueError(f"the kernel {self.name} is launched on a grid of {grid} blocks")
        used[self.compiled] = None


def load(name: str, binary: bytes, shared: int, device: int) -> tuple[object, object, int, int, int]:
    """Returns what a driver does: module, function, registers, spilled registers, and the most threads of a block."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = USAGE.search(said)
    assert found, said
    registers, stack, local = map(int, found.groups())
    launcher, spilled = Driver.loading, max(stack, local)
    of_warp = 32 * (-(-registers // REGISTER_UNIT) * REGISTER_UNIT)
    _check(name, launcher.warps * of_warp, MOST_REGISTERS, "registers")
    code = hashlib.sha256(binary).hexdigest()[:16]
    launcher.compiled = Compiled(name, code, launcher.warps, registers, spilled, shared, launcher.in_tf32)
    used[launcher.compiled] = None
    return object(), object(), registers, spilled // 4, min(1024, 32 * (MOST_REGISTERS // of_warp))


def _read(module: object, function: object, name: str, files: dict[str, str], digest: str) -> None:
    """Reads the assembly of the kernel that is loaded next."""
    (assembly,) = (path for path in files.values() if path.endswith(".ptx"))
    Driver.loading.in_tf32 = ".tf32" in Path(assembly).read_text(encoding="utf-8")


def _check(name: str, needed: int, limit: int, what: str) -> None:
    if needed > limit:
        left_out[name] = None
        raise BeyondLimits(needed, limit, what, name)


def _properties(device: int | None = None) -> dict[str, int]:
    found = torch.cuda.get_device_properties(device)
    return {
        "max_shared_mem": found.shared_memory_per_block_optin,
        "multiprocessor_count": found.multi_processor_count,
        "max_num_regs": found.regs_per_multiprocessor,
        "warpSize": found.warp_size,
    }


class Driver(CudaDriver):
    """Triton's driver for NVIDIA's GPUs, without CUDA."""

    loading: Launcher
    """The launcher of the kernel that is loaded next."""

    def __init__(self) -> None:
        GPUDriver.__init__(self)
        self.launcher_cls = Launcher
        self.utils = SimpleNamespace(load_binary=load, get_device_properties=_properties)

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def once(call: Callable[[], object], **_: object) -> list[float]:
            call()
            return [0.0, 0.0, 0.0]

        return once


def install() -> None:
    """Makes Triton, and torch's compiler, use this driver in this process."""
    backends["nvidia"] = Backend(compiler=backends["nvidia"].compiler, driver=Driver)
    triton.runtime.driver.set_active(Driver())
    triton.knobs.runtime.kernel_load_start_hook.add(_read)
