"""What joins the GPUs of a host, and hosts: NVLink and PCIe by nvidia-smi, InfiniBand and RoCE by the kernel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from llmtrain.doctor.finding import Finding, fault, ok, warning
from llmtrain.doctor.scene import Scene, ask

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def gpu_links(scene: Scene) -> Iterator[Finding]:
    """Links between each two GPUs, and NVLinks that are down."""
    answer = ask("nvidia-smi", "topo", "-m")
    if answer.refusal:
        yield ok("interconnect.gpus", f"links between GPUs not looked at: {answer.refusal}")
        return
    links = between_gpus(answer.text)
    if not links:
        yield ok("interconnect.gpus", "no two GPUs, so no links between them")
        return
    told = ", ".join(f"{kind} between {count} pairs" for kind, count in links.most_common())
    yield ok("interconnect.gpus", f"links between GPUs: {told}")
    down, up = count_links(ask("nvidia-smi", "nvlink", "--status").text)
    if down and up:
        text = f"{down} of {down + up} NVLinks are down"
        yield warning(
            "interconnect.nvlink", text, "`nvidia-smi nvlink --status` names them; see the fabric manager's log"
        )


def between_gpus(text: str) -> Counter[str]:
    """How often each kind of link joins two GPUs, of `nvidia-smi topo -m`."""
    lines = [ESCAPE.sub("", line).split() for line in text.splitlines()]
    lines = [line for line in lines if line and line[0].startswith("GPU")]
    rows = [line for line in lines if "X" in line]
    found: Counter[str] = Counter()
    for number, row in enumerate(rows):
        found.update(row[1 + number + 1 : 1 + len(rows)])
    return found


def count_links(text: str) -> tuple[int, int]:
    """(inactive, active) NVLinks, of `nvidia-smi nvlink --status`."""
    states = re.findall(r"Link \d+:\s*(.*)", text)
    down = sum("inactive" in state.lower() for state in states)
    return down, len(states) - down


def adapters(scene: Scene) -> Iterator[Finding]:
    """Ports of InfiniBand and RoCE adapters, their state and rate."""
    root = scene.sys / "class" / "infiniband"
    ports = sorted(root.glob("*/ports/*"))
    if not ports:
        yield ok("interconnect.adapters", f"no InfiniBand or RoCE adapter in {root}")
        return
    active: list[str] = []
    other: list[str] = []
    for port in ports:
        name = f"{port.parent.parent.name}:{port.name}"
        state = _read(port / "state").partition(":")[2].strip()
        told = f"{name} {_read(port / 'link_layer')} {_read(port / 'rate')}"
        (active if state == "ACTIVE" else other).append(told if state == "ACTIVE" else f"{name} is {state or 'silent'}")
    if active:
        yield ok("interconnect.adapters", "; ".join(active))
    if other and not active:
        yield fault("interconnect.adapters", f"no port is up: {'; '.join(other)}", "cable, switch, subnet manager")
    elif other:
        yield warning("interconnect.adapters", "; ".join(other), "leave them out by NCCL_IB_HCA, or bring them up")


def has_adapters(scene: Scene) -> bool:
    """Whether there is an adapter that memory is registered with."""
    return any((scene.sys / "class" / "infiniband").glob("*"))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
