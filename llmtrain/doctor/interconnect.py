"""Links between GPUs and between hosts: NVLink and PCIe from nvidia-smi, InfiniBand and RoCE from the kernel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from llmtrain.doctor.finding import Finding, fault, ok, warning
from llmtrain.doctor.scene import Scene, ask

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def gpu_links(scene: Scene) -> Iterator[Finding]:
    """Checks the links between all pairs of GPUs, and reports NVLinks that are down."""
    answer = ask("nvidia-smi", "topo", "-m")
    if answer.refusal:
        yield ok("interconnect.gpus", f"links between GPUs not checked: {answer.refusal}")
        return
    links = between_gpus(answer.text)
    if not links:
        yield ok("interconnect.gpus", "fewer than two GPUs, so there are no links between them")
        return
    told = ", ".join(f"{kind} between {count} pairs" for kind, count in links.most_common())
    yield ok("interconnect.gpus", f"links between GPUs: {told}")
    down, up = count_links(ask("nvidia-smi", "nvlink", "--status").text)
    if down and up:
        text = f"{down} of {down + up} NVLinks are down"
        yield warning(
            "interconnect.nvlink", text, "`nvidia-smi nvlink --status` lists them; see the fabric manager's log"
        )


def between_gpus(text: str) -> Counter[str]:
    """Counts the pairs of GPUs per kind of link in the output of `nvidia-smi topo -m`."""
    lines = [ESCAPE.sub("", line).split() for line in text.splitlines()]
    lines = [line for line in lines if line and line[0].startswith("GPU")]
    rows = [line for line in lines if "X" in line]
    found: Counter[str] = Counter()
    for number, row in enumerate(rows):
        found.update(row[1 + number + 1 : 1 + len(rows)])
    return found


def count_links(text: str) -> tuple[int, int]:
    """Counts (inactive, active) NVLinks in the output of `nvidia-smi nvlink --status`."""
    states = re.findall(r"Link \d+:\s*(.*)", text)
    down = sum("inactive" in state.lower() for state in states)
    return down, len(states) - down


def adapters(scene: Scene) -> Iterator[Finding]:
    """Checks the state and the rate of the ports of InfiniBand and RoCE adapters."""
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
        yield fault(
            "interconnect.adapters", f"no port is up: {'; '.join(other)}", "check cable, switch and subnet manager"
        )
    elif other:
        yield warning("interconnect.adapters", "; ".join(other), "exclude them with NCCL_IB_HCA, or bring them up")


def has_adapters(scene: Scene) -> bool:
    """Whether there is an adapter that memory is registered with."""
    return any((scene.sys / "class" / "infiniband").glob("*"))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
