"""The machine: nodes × devices, and what a device can do."""

from __future__ import annotations

import os
import subprocess
from functools import cache

from pydantic import field_validator

from llmtrain.errors import nearest
from llmtrain.recipe import Part, PositiveInt

GIB = 2**30


class Device(Part):
    """One accelerator, by its datasheet."""

    name: str
    """Key in `DEVICES`."""
    memory_bytes: PositiveInt | None
    """Memory; None where it is the host's and unknown."""
    peak_flops: dict[str, float]
    """Dense peak by data type, FLOP/s; a type that is not listed has no published peak."""

    @property
    def on_cpu(self) -> bool:
        """Whether workers compute on the host, and talk through gloo."""
        return self.name == "cpu"


def _device(name: str, gib: int | None, **tflops: float) -> Device:
    peaks = {dtype: value * 1e12 for dtype, value in tflops.items()}
    return Device(name=name, memory_bytes=gib and gib * GIB, peak_flops=peaks)


DEVICES = {
    device.name: device
    for device in (
        # Dense, without sparsity, from the vendors' datasheets (SXM / OAM forms). fp32 on the
        # NVIDIA parts is plain fp32, since torch leaves TF32 matrix products off by default.
        _device("a100", 80, bf16=312, fp16=312, fp32=19.5),
        _device("h100", 80, bf16=989, fp16=989, fp32=67),
        _device("h200", 141, bf16=989, fp16=989, fp32=67),
        _device("b200", 180, bf16=2250, fp16=2250, fp32=75),
        _device("mi300x", 192, bf16=1307, fp16=1307, fp32=163.4),
        _device("cpu", None),
        # A GPU that is not in this table: trains, but has no MFU.
        _device("gpu", None),
    )
}


class Cluster(Part):
    """Equal nodes, each with the same devices."""

    nodes: PositiveInt = 1
    """Machines."""
    devices_per_node: PositiveInt = 1
    """Devices, and so worker processes, on each."""
    device: str = "cpu"
    """Name of the device in the catalogue."""

    @field_validator("device")
    @classmethod
    def _known(cls, name: str) -> str:
        if name.lower() not in DEVICES:
            raise ValueError(f"unknown device{nearest(name.lower(), DEVICES)} (known: {', '.join(DEVICES)})")
        return name.lower()

    @property
    def world_size(self) -> int:
        """Devices, and so workers, in all."""
        return self.nodes * self.devices_per_node

    @property
    def spec(self) -> Device:
        """The device's entry in the catalogue."""
        return DEVICES[self.device]


def local_cluster(nproc: int | None = None) -> Cluster:
    """This machine: its visible GPUs, else `nproc` CPU workers (default 1).

    With GPUs, `nproc` takes that many of them.
    """
    gpus = [] if os.environ.get("DS_ACCELERATOR") == "cpu" else visible_gpus()
    if not gpus:
        return Cluster(devices_per_node=nproc or 1, device="cpu")
    return Cluster(devices_per_node=nproc or len(gpus), device=device_of(gpus[0]))


@cache
def visible_gpus() -> tuple[str, ...]:
    """Product names of the NVIDIA GPUs that this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    names = [line.strip() for line in output.splitlines() if line.strip()]
    if visible is None:
        return tuple(names)
    chosen = [entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]
    # Entries may be indices or UUIDs; how many there are is all that matters here.
    return tuple(names[:1] * len(chosen)) if names else ()


def device_of(product: str) -> str:
    """Catalogue name of a product such as `NVIDIA H100 80GB HBM3`; `gpu` for one that is not in it."""
    words = product.lower()
    return next((name for name in DEVICES if name in words and name not in ("cpu", "gpu")), "gpu")
