"""Devices: what the driver lists, what CUDA_VISIBLE_DEVICES leaves of it, what torch sees, and the links between them.

Links are NVLink and PCIe from nvidia-smi, InfiniBand and RoCE from the kernel.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import reason
from llmtrain.launch.doctor.finding import (
    Finding,
    HostContext,
    fault,
    ok,
    run_command,
    warning,
)
from llmtrain.system.host import available_cores, memory_bytes, memory_limit
from llmtrain.system.quantities import readable_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"
FIELDS = "index,uuid,name,memory.total,memory.used,driver_version,ecc.errors.uncorrected.volatile.total"
IN_USE_MIB = 1024
"""More than the driver and a display use."""


@dataclass(frozen=True)
class Gpu:
    """A line of nvidia-smi. Memory in MiB, or None if the driver does not report it."""

    index: str
    uuid: str
    name: str
    memory: int | None
    used: int | None
    driver: str
    errors: str


def host(context: HostContext) -> Iterator[Finding]:
    """Checks the processors and the memory that this process may use."""
    cpus = available_cores()
    text = f"{cpus} of {os.cpu_count()} CPUs"
    quota = _cpu_quota()
    if quota is not None and quota < cpus:
        text += f", limited to the time of {quota:.1f}"
    total, limit = memory_bytes(), memory_limit()
    limited = f", limited to {readable_bytes(limit)}" if limit is not None and limit < total else ""
    yield ok("devices.host", f"{text}; {readable_bytes(total)} of host memory{limited}")


def gpus(context: HostContext) -> Iterator[Finding]:
    """Checks the GPUs that the driver lists against those that torch sees; loads torch."""
    output = run_command("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
    all_gpus = parse_gpus(output.text)
    if output.error and "not installed" not in output.error:
        yield fault("devices.driver", output.error, "check `nvidia-smi` and `dmesg | grep -i nvrm`; restart the host")
        return
    seen, why = seen_by_torch()
    if not all_gpus:
        if seen:
            yield ok("devices.gpus", f"torch sees {count_names(seen)}; {output.error or 'nvidia-smi lists none'}")
        else:
            yield ok("devices.gpus", f"no GPU: {output.error or 'nvidia-smi lists none'}; torch sees none ({why})")
        return
    yield ok("devices.gpus", f"{_summary(all_gpus)}; driver {all_gpus[0].driver}")
    visible, problems = visible_gpus(context.env.get(VISIBLE), all_gpus)
    yield from problems
    yield from _gpu_findings(visible, context)
    if len(seen) != len(visible) and not problems:
        text = f"torch sees {len(seen)} of {len(visible)} GPUs" + (f": {why}" if why else "")
        yield fault("devices.torch", text, "install the build of torch for this driver (see pytorch.org)")
    elif seen:
        yield ok("devices.torch", f"torch sees {count_names(seen)}")


def slots(context: HostContext) -> Iterator[Finding]:
    """Checks that the devices in a hostfile exist; loads torch."""
    if not context.devices:
        return
    seen, _ = seen_by_torch()
    slots, cpus = max(context.devices) + 1, available_cores()
    if seen and slots > len(seen):
        text = f"the hostfile gives {slots} slots, but torch sees {len(seen)} GPUs"
        yield fault("devices.slots", text, f"write slots={len(seen)}")
    elif not seen and len(context.devices) > cpus:
        text = f"the hostfile gives {len(context.devices)} workers, but there are {cpus} CPUs"
        yield warning("devices.slots", text, f"write slots={cpus}")


def parse_gpus(text: str) -> list[Gpu]:
    """Parses the output of nvidia-smi's query."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == FIELDS.count(",") + 1:
            index, uuid, name, memory, used, driver, errors = fields
            gpus.append(Gpu(index, uuid, name, _number(memory), _number(used), driver, errors))
    return gpus


def visible_gpus(visible: str | None, all_gpus: list[Gpu]) -> tuple[list[Gpu], list[Finding]]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves, and what is wrong with it.

    CUDA accepts indices and prefixes of UUIDs, and silently ignores everything after an entry it does not know.
    """
    if visible is None:
        return all_gpus, []
    chosen: list[Gpu] = []
    entries = [entry.strip() for entry in visible.split(",")] if visible.strip() else []
    for entry in entries:
        if entry.startswith("MIG-"):
            text = f"{VISIBLE} names the GPU partition {entry}, which was not checked"
            return chosen, [warning("devices.visible", text, "a run uses whole GPUs: name these")]
        matching = [gpu for gpu in all_gpus if entry == gpu.index or (len(entry) > 4 and gpu.uuid.startswith(entry))]
        if entry == "-1":
            break
        if len(matching) != 1:
            which = "no GPU" if not matching else f"{len(matching)} GPUs"
            text = (
                f"{VISIBLE}={visible}: '{entry}' matches {which} of the {len(all_gpus)} here; CUDA ignores the "
                "entries from there on"
            )
            return chosen, [
                fault("devices.visible", text, f"export {VISIBLE}={','.join(gpu.index for gpu in all_gpus)}")
            ]
        if matching[0] in chosen:
            text = f"{VISIBLE}={visible} names GPU {matching[0].index} twice: CUDA then shows none"
            unique = ",".join(dict.fromkeys(entries))
            return [], [fault("devices.visible", text, f"export {VISIBLE}={unique}")]
        chosen.append(matching[0])
    indices = ", ".join(gpu.index for gpu in chosen)
    text = f"{VISIBLE}={visible}: " + (f"GPUs {indices} of {len(all_gpus)}" if chosen else "no GPU")
    if not chosen:
        return [], [warning("devices.visible", f"{text} of {len(all_gpus)} can be used", f"unset {VISIBLE}")]
    return chosen, [ok("devices.visible", text)] if len(chosen) < len(all_gpus) else []


def count_names(names: list[str]) -> str:
    """Formats device names as `8 × NVIDIA H100 80GB HBM3`, for each kind."""
    return ", ".join(f"{count} × {name}" for name, count in Counter(names).items())


def _summary(all_gpus: list[Gpu]) -> str:
    kinds = Counter((gpu.name, gpu.memory) for gpu in all_gpus)
    return ", ".join(
        f"{count} × {name}" + (f" with {readable_bytes(memory * 2**20)}" if memory else "")
        for (name, memory), count in kinds.items()
    )


def _gpu_findings(visible: list[Gpu], context: HostContext) -> Iterator[Finding]:
    if broken := [gpu.index for gpu in visible if gpu.errors not in ("0", "[N/A]", "N/A", "[Not Supported]")]:
        text = f"GPUs {', '.join(broken)} had memory errors that could not be corrected"
        yield fault("devices.memory_errors", text, "reset them, or leave them out; see `nvidia-smi -q -d ECC`")
    if busy := [gpu.index for gpu in visible if (gpu.used or 0) > IN_USE_MIB]:
        text = f"GPUs {', '.join(busy)} have more than {IN_USE_MIB} MiB in use"
        yield warning("devices.in_use", text, "`nvidia-smi` lists the processes")
    kinds = {gpu.name for gpu in visible}
    if len(kinds) > 1:
        text = (
            f"several kinds of GPUs, of which the slowest sets the pace: {count_names([gpu.name for gpu in visible])}"
        )
        yield warning("devices.kinds", text, f"choose GPUs of one kind with {VISIBLE}")
    if len(kinds) > 1 and context.env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        text = "CUDA numbers GPUs of several kinds by speed, but nvidia-smi by slot"
        yield warning("devices.order", text, "export CUDA_DEVICE_ORDER=PCI_BUS_ID")


def seen_by_torch() -> tuple[list[str], str]:
    """Returns the product names of the GPUs that torch can use, and the reason if there are none."""
    try:
        import torch

        if not (torch.version.cuda or torch.version.hip):
            return [], "this build of torch is for CPUs"
        count = torch.cuda.device_count()
        return [torch.cuda.get_device_properties(index).name for index in range(count)], "" if count else "no device"
    except Exception as error:  # an outdated driver, a lost device: the message says which
        return [], reason(error)


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _cpu_quota() -> float | None:
    """Returns the CPU time that the control group grants, in CPUs, or None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def gpu_links(context: HostContext) -> Iterator[Finding]:
    """Checks the links between all pairs of GPUs, and reports NVLinks that are down."""
    output = run_command("nvidia-smi", "topo", "-m")
    if output.error:
        yield ok("interconnect.gpus", f"links between GPUs not checked: {output.error}")
        return
    links = count_gpu_links(output.text)
    if not links:
        yield ok("interconnect.gpus", "fewer than two GPUs, so there are no links between them")
        return
    text = ", ".join(f"{kind} between {count} pairs" for kind, count in links.most_common())
    yield ok("interconnect.gpus", f"links between GPUs: {text}")
    down, up = count_links(run_command("nvidia-smi", "nvlink", "--status").text)
    if down and up:
        text = f"{down} of {down + up} NVLinks are down"
        yield warning(
            "interconnect.nvlink", text, "`nvidia-smi nvlink --status` lists them; see the fabric manager's log"
        )


def count_gpu_links(text: str) -> Counter[str]:
    """Counts the pairs of GPUs per kind of link in the output of `nvidia-smi topo -m`."""
    lines = [ESCAPE.sub("", line).split() for line in text.splitlines()]
    lines = [line for line in lines if line and line[0].startswith("GPU")]
    rows = [line for line in lines if "X" in line]
    counts: Counter[str] = Counter()
    for number, row in enumerate(rows):
        counts.update(row[1 + number + 1 : 1 + len(rows)])
    return counts


def count_links(text: str) -> tuple[int, int]:
    """Counts (inactive, active) NVLinks in the output of `nvidia-smi nvlink --status`."""
    states = re.findall(r"Link \d+:\s*(.*)", text)
    down = sum("inactive" in state.lower() for state in states)
    return down, len(states) - down


def adapters(context: HostContext) -> Iterator[Finding]:
    """Checks the state and the rate of the ports of InfiniBand and RoCE adapters."""
    root = context.sys / "class" / "infiniband"
    ports = sorted(root.glob("*/ports/*"))
    if not ports:
        yield ok("interconnect.adapters", f"no InfiniBand or RoCE adapter in {root}")
        return
    active: list[str] = []
    other: list[str] = []
    for port in ports:
        name = f"{port.parent.parent.name}:{port.name}"
        state = _read(port / "state").partition(":")[2].strip()
        text = f"{name} {_read(port / 'link_layer')} {_read(port / 'rate')}"
        (active if state == "ACTIVE" else other).append(text if state == "ACTIVE" else f"{name} is {state or 'silent'}")
    if active:
        yield ok("interconnect.adapters", "; ".join(active))
    if other and not active:
        yield fault(
            "interconnect.adapters", f"no port is up: {'; '.join(other)}", "check cable, switch and subnet manager"
        )
    elif other:
        yield warning("interconnect.adapters", "; ".join(other), "exclude them with NCCL_IB_HCA, or bring them up")


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
