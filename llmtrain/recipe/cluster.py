"""The machine: nodes × devices, and the properties of a device."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterable
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from llmtrain.errors import Problem, RecipeError, did_you_mean, format_value
from llmtrain.recipe import Many, Part, PositiveFloat, PositiveInt
from llmtrain.system.host import cache_root
from llmtrain.system.untrusted import UNREADABLE, expanded, file_fault, read_json

GIB = 2**30
MAX_RANKS = 2**31 - 1
"""Largest number of ranks in torch.distributed, which numbers them with an `int`."""


class Device(Part):
    """One accelerator, according to its datasheet."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Key in `DEVICES`, in lower case."""
    memory_bytes: Annotated[int, Field(gt=0)] | None
    """What torch can use (`total_memory` of its device properties), less than the datasheet's; None if it is the
    host's and unknown. A prediction counts the device's context as a part of it."""
    peak_flops: dict[str, Annotated[float, Field(gt=0)]]
    """Dense peak by data type, FLOP/s; a type that is not listed has no published peak."""
    memory_bandwidth: PositiveFloat | None = None
    """Bytes per second to and from the device's memory; None if unknown, as for the following fields."""
    node_bandwidth: PositiveFloat | None = None
    """Bytes per second, each way, between a device and the others of its node."""
    network_bandwidth: PositiveFloat | None = None
    """Bytes per second, each way, between a device and those of other nodes: its share of the node's adapters."""
    host_bandwidth: PositiveFloat | None = None
    """Bytes per second, each way, between a device and its host's memory."""

    @property
    def on_cpu(self) -> bool:
        """Whether workers compute on the host, and communicate through gloo."""
        return self.name == "cpu"


def _device(name: str, gib: float, gigabytes: tuple[float, float, float, float], **tflops: float) -> Device:
    """Creates a device. gigabytes: GB/s of the memory, the links within a node, the network and the host, each way."""
    memory, node, network, host = (rate * 1e9 for rate in gigabytes)
    return Device(
        name=name,
        memory_bytes=int(gib * GIB),
        peak_flops={dtype: value * 1e12 for dtype, value in tflops.items()},
        memory_bandwidth=memory,
        node_bandwidth=node,
        network_bandwidth=network,
        host_bandwidth=host,
    )


DEVICES = {
    device.name: device
    for device in (
        # Peaks are dense, without sparsity, from the vendors' datasheets (SXM / OAM forms). fp32 on the
        # NVIDIA parts is plain fp32, since torch leaves TF32 matrix products off by default.
        # Memory and links are from the same datasheets: NVLink 3, 4 and 5 are 600, 900 and 1800 GB/s
        # both ways together, Infinity Fabric 7 × 128. The network is that of the vendors' own systems,
        # one adapter for each device: DGX A100 8 × 200 Gbit/s, DGX H100, H200 and B200 and the MI300X
        # platform 8 × 400 Gbit/s. The host is PCIe 4.0 × 16 for the A100, 5.0 × 16 for the others.
        # The first number is GiB of memory, the lowest "total capacity" in torch's errors in public logs, since it
        # depends on the driver and on virtualization: A100 of 80 GB 79.14 to 79.35, H100 79.10 (an example in
        # stas00/ml-engineering) to 79.21, H200 139.72 to 139.81, B200 178.35 (also in pytorch/ao#4002) and 178.36,
        # MI300X 191.69 and 191.98 (AMD's documentation of ROCm).
        _device("a100", 79.14, (2039, 300, 25, 32), bf16=312, fp16=312, fp32=19.5),
        _device("h100", 79.1, (3350, 450, 50, 64), bf16=989, fp16=989, fp32=67),
        _device("h200", 139.72, (4800, 450, 50, 64), bf16=989, fp16=989, fp32=67),
        _device("b200", 178.35, (8000, 900, 50, 64), bf16=2250, fp16=2250, fp32=75),
        _device("mi300x", 191.69, (5300, 448, 50, 64), bf16=1307, fp16=1307, fp32=163.4),
        # A CPU's performance depends on the host: to have its times predicted, describe it (`own_devices`).
        Device(name="cpu", memory_bytes=None, peak_flops={}),
        # A GPU that is not in this table can train, but has no MFU.
        Device(name="gpu", memory_bytes=None, peak_flops={}),
    )
}


def known_devices(own: Iterable[Device] = ()) -> dict[str, Device]:
    """Returns the catalogue with a user's own devices, which take precedence over entries of the same name."""
    return DEVICES | {device.name: device for device in own}


class MeasuredRates(Part):
    """The rates that the devices of a node reach together, those of the slowest one (`llmtrain doctor --self-test`).

    They replace the shares of a datasheet's peaks that a prediction of time otherwise assumes.
    """

    device: str
    """Name of the device in the catalogue."""
    matmul: dict[str, PositiveFloat]
    """FLOP/s of a layer's matrix products, by data type."""
    attention: dict[str, PositiveFloat]
    """FLOP/s of causal attention, forward and backward, by data type; the half above the diagonal is not counted."""
    memory_bandwidth: PositiveFloat
    """Bytes per second that a copy within the device's memory reads and writes."""
    launch_s: PositiveFloat
    """Seconds between the starts of two kernels."""
    host_bandwidth: PositiveFloat | None = None
    """Bytes per second, each way, between a device and pinned memory of its host; None on a CPU."""
    node_bandwidth: PositiveFloat | None = None
    """Bus bandwidth of a large all-reduce over all devices of the node, in bytes per second; None for a single one."""


class Cluster(Part):
    """Equal nodes, each with the same devices."""

    nodes: Annotated[int, Field(gt=0, le=MAX_RANKS)] = 1
    """Number of machines."""
    devices_per_node: PositiveInt = 1
    """Number of devices, and of worker processes, on each machine; at most `MAX_RANKS` in total."""
    own_devices: Many[Device] = ()
    """Devices that are not in the catalogue, or differ from their entry."""
    device: str = "cpu"
    """Name of the device, in the catalogue or in `own_devices`."""
    node_bandwidth: PositiveFloat | None = None
    """Bytes per second, each way, between devices of a node; default: that of the device."""
    network_bandwidth: PositiveFloat | None = None
    """Bytes per second and device, each way, between nodes; default: that of the device."""
    measured: MeasuredRates | None = None
    """Rates that were measured on such a node; `measured_on` reads them from the report of a self-test."""

    @field_validator("device")
    @classmethod
    def _known(cls, device: str, info: ValidationInfo) -> str:
        """Converts the name to lower case. `own_devices` is declared before this field, so it has been validated."""
        known = known_devices(info.data.get("own_devices", ()))
        if device.lower() not in known:
            raise ValueError(f"unknown device{did_you_mean(device.lower(), known)} (known: {', '.join(known)})")
        return device.lower()

    @field_validator("devices_per_node")
    @classmethod
    def _numbered(cls, devices_per_node: int, info: ValidationInfo) -> int:
        world = info.data.get("nodes", 1) * devices_per_node
        if world > MAX_RANKS:
            raise ValueError(
                f"{info.data['nodes']:,} such nodes have {world:,} ranks, but at most {MAX_RANKS:,} are possible"
            )
        return devices_per_node

    @field_validator("measured")
    @classmethod
    def _of_this_device(cls, measured: MeasuredRates | None, info: ValidationInfo) -> MeasuredRates | None:
        if measured and measured.device != info.data.get("device", measured.device):
            raise ValueError(f"was measured on '{measured.device}', but the device is '{info.data['device']}'")
        return measured

    @property
    def world_size(self) -> int:
        """Total number of devices, and of workers."""
        return self.nodes * self.devices_per_node

    @property
    def spec(self) -> Device:
        """The properties of the device, with the links of this cluster."""
        device = known_devices(self.own_devices)[self.device] if self.own_devices else DEVICES[self.device]
        links = {"node_bandwidth": self.node_bandwidth, "network_bandwidth": self.network_bandwidth}
        changed = {name: value for name, value in links.items() if value is not None}
        return device.model_copy(update=changed) if changed else device

    def resized(self, nodes: int | None, devices_per_node: int | None, device: str | None) -> Cluster:
        """Returns a cluster of another size or device; with another device, the links are that device's own.

        Raises ValidationError for an unknown device and for sizes that are not positive.
        """
        fields: dict[str, Any] = self.model_dump()
        if device is not None and device.lower() != self.device:
            fields |= {"device": device, "node_bandwidth": None, "network_bandwidth": None, "measured": None}
        fields |= {"nodes": nodes or self.nodes, "devices_per_node": devices_per_node or self.devices_per_node}
        return Cluster.model_validate(fields)


def local_cluster(nproc: int | None = None, *, is_measured: bool = True) -> Cluster:
    """Returns this machine: its visible GPUs, else `nproc` CPU workers (default 1).

    With GPUs, `nproc` is the number of them to use. is_measured: whether to include the rates that a self-test has
    measured; this raises RecipeError if `LLMTRAIN_SELF_TEST` names a report that cannot be used.
    """
    gpus = [] if os.environ.get("DS_ACCELERATOR") == "cpu" else visible_gpus()
    device = device_of(gpus[0]) if gpus else "cpu"
    measured = _measured(device) if is_measured else None
    return Cluster(devices_per_node=nproc or len(gpus) or 1, device=device, measured=measured)


SELF_TEST = "LLMTRAIN_SELF_TEST"
"""Environment variable that names the report of a self-test."""


def _measured(device: str) -> MeasuredRates | None:
    """Returns the rates in this machine's report; None without a usable one, unless the user has named it."""
    named = os.environ.get(SELF_TEST)
    try:
        found = measured_on(self_test_report())
        fault = f"was measured on '{found.device}', but the device of this machine is '{device}'"
    except UNREADABLE as error:  # without a name: there may be no report, or one of an older version
        found, fault = None, f"has no rates: {file_fault(error)}"
    if found and found.device == device:
        return found
    if named:
        fix = f"name a report that `llmtrain doctor --self-test` has written on such a device, or `unset {SELF_TEST}`"
        raise RecipeError(Problem("cluster.measured", SELF_TEST, f"{format_value(named)} {fault}", fix))
    return None


def measured_on(report: Path | str) -> MeasuredRates:
    """Returns what a report of `llmtrain doctor --self-test` has measured, for `Cluster.measured`.

    Raises OSError or ValueError if there is no report, or if it has no measurements.
    """
    return MeasuredRates.model_validate(read_json(Path(report), dict[str, Any]).get("measured"))


def self_test_folder() -> Path:
    """Returns the folder of this machine's self-test; a home directory may be shared by machines."""
    return cache_root() / "self_test" / socket.gethostname()


def self_test_report() -> Path:
    """Returns the report of this machine's self-test: the one that the user has named, or that in its folder."""
    named = os.environ.get(SELF_TEST)
    return expanded(named) if named else self_test_folder() / "report.json"


NVIDIA_SMI_S = 60
"""Without persistence mode, nvidia-smi initialises each GPU, which takes seconds."""


@cache
def visible_gpus() -> tuple[str, ...]:
    """Returns the product names of the NVIDIA GPUs that this process may use, without importing torch.

    Raises RecipeError if CUDA_VISIBLE_DEVICES has an entry that matches no GPU, or one twice: CUDA would then hide
    other GPUs, or all. Raises it, too, if nvidia-smi does not answer: a run would otherwise train on CPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=uuid,name", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout
    except subprocess.TimeoutExpired:
        message = f"has not answered within {NVIDIA_SMI_S} s, so the GPUs of this machine are unknown"
        fix = "repair the driver (`llmtrain doctor`); to train on CPUs, set DS_ACCELERATOR=cpu"
        raise RecipeError(Problem("launch.devices", "nvidia-smi", message, fix)) from None
    except (OSError, subprocess.SubprocessError):
        return ()  # no NVIDIA driver on this machine
    gpus = [(uuid.strip(), name.strip()) for uuid, _, name in (line.partition(",") for line in output.splitlines())]
    return tuple(name for _, name in gpus) if visible is None or not gpus else tuple(_chosen(visible, gpus))


NO_GPU = ("", "-1", "NoDevFiles")
"""Entries that end the list; Slurm writes the last one if a task has no GPU."""


def _chosen(visible: str, gpus: list[tuple[str, str]]) -> list[str]:
    """Returns the names of the GPUs that CUDA_VISIBLE_DEVICES lists by index, UUID or prefix of one.

    gpus: (UUID, name).
    """
    entries = list(takewhile(lambda entry: entry not in NO_GPU, (entry.strip() for entry in visible.split(","))))
    names, problems = [], []
    for number, entry in enumerate(entries):
        if entry.isdecimal() and int(entry) < len(gpus):
            names.append(gpus[int(entry)][1])
        elif entry.startswith("MIG-"):  # a partition of a GPU, which is not in this list
            names.append(gpus[0][1])
        elif len(found := [name for uuid, name in gpus if entry.startswith("GPU-") and uuid.startswith(entry)]) == 1:
            names += found
        else:
            problems.append(f"'{entry}' matches none of this machine's {len(gpus)} GPUs, 0 to {len(gpus) - 1}")
        if entry in entries[:number]:
            problems.append(f"names '{entry}' twice")
    if problems:
        fix = "use indices or UUIDs as listed by `nvidia-smi -L`"
        raise RecipeError(Problem("launch.devices", "CUDA_VISIBLE_DEVICES", problem, fix) for problem in problems)
    return names


def device_of(product: str) -> str:
    """Returns the catalogue name of a product such as `NVIDIA H100 80GB HBM3`, or `gpu` if it is not in it."""
    words = product.lower()
    return next((name for name in DEVICES if name in words and name not in ("cpu", "gpu")), "gpu")
