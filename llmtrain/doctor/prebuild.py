"""DeepSpeed's operators compiled ahead of training, into the cache that it looks in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.doctor.finding import Finding, fault, ok
from llmtrain.doctor.reach import Channel
from llmtrain.launch.disks import LIBAIO
from llmtrain.recipe import ParallelConfig

DISK = ("pin_memory", "async_io")
"""For states on a disk; the second is linked against the first."""
BUILD_S = 1800
"""Longest time for one operator: a minute or two, where nobody else computes."""
PINNED = "DS_PIN_MEMORY_BACKEND"
"""With the value `native` DeepSpeed pins host memory by an operator of its own."""


def operators_of(parallel: ParallelConfig | None, env: Mapping[str, str]) -> tuple[str, ...]:
    """What training compiles at its start, of a recipe; without one, whatever a recipe might.

    That is little: the optimizer is torch's own, offloaded or not, and gloo does what DeepSpeed's shared-memory
    collective would.
    """
    if parallel is None:
        return DISK
    offload = {parallel.offload_optimizer, parallel.offload_param}
    if "nvme" in offload:
        return DISK
    return DISK[:1] if "cpu" in offload and env.get(PINNED, "").strip().lower() == "native" else ()


def build(
    channel: Channel, operators: Sequence[str], on_cpu: bool, is_needed: bool
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Builds them on a host; what was found, and {operator, seconds, file, error} of each. Raises UnreachableError.

    is_needed: whether a recipe asks for them; else a host without libaio does without.
    """
    channel.send("build", operators=list(operators), accelerator="cpu" if on_cpu else "cuda")
    findings: list[Finding] = []
    built = []
    for _ in operators:
        reply = channel.reply(BUILD_S)
        built.append(reply)
        findings += _judge(reply, is_needed)
    return findings, built


def nothing_to_build() -> Finding:
    """Where a recipe wants no operator."""
    return ok("prebuild.none", "the recipe compiles no operator of DeepSpeed: torch's own optimizers, no disk")


def _judge(built: Mapping[str, Any], is_needed: bool) -> Iterator[Finding]:
    check, name = f"prebuild.{built['operator']}", built["operator"]
    if "libaio" in built["error"] and not built["seconds"]:
        text = f"{name} not built, which only offload to a disk needs: {built['error']}"
        yield fault(check, text, LIBAIO) if is_needed else ok(check, text)
    elif built["error"]:
        yield fault(check, f"{name} was not built:\n{built['error']}", "see `tools` above: compiler, ninja, libaio")
    else:
        yield ok(check, f"{name} in {Path(built['file']).parent}, {built['seconds']:.1f} s")
