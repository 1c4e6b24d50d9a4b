"""Compiles DeepSpeed's operators before training, into the cache that DeepSpeed uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.launch.disks import LIBAIO
from llmtrain.launch.doctor.channel import Channel
from llmtrain.launch.doctor.finding import Finding, fault, ok
from llmtrain.recipe import ParallelConfig

DISK = ("pin_memory", "async_io")
"""Operators for states on disk; the second is linked against the first."""
BUILD_S = 1800
"""Longest time in seconds for one operator; on an idle machine it takes a minute or two."""
PINNED = "DS_PIN_MEMORY_BACKEND"
"""With the value `native`, DeepSpeed pins host memory with an operator of its own."""


def operators_of(parallel: ParallelConfig | None, env: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the operators that training compiles at its start for a recipe; without one, those that any recipe might.

    These are few: the optimizer is torch's own, offloaded or not, and gloo replaces DeepSpeed's shared-memory
    collective.
    """
    if parallel is None:
        return DISK
    offload = {parallel.offload_optimizer, parallel.offload_param}
    if "nvme" in offload:
        return DISK
    return DISK[:1] if "cpu" in offload and env.get(PINNED, "").strip().lower() == "native" else ()


def build_operators(
    channel: Channel, operators: Sequence[str], on_cpu: bool, is_needed: bool
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Builds operators on a host. Returns the findings, and {operator, seconds, file, error} of each operator.

    is_needed: whether a recipe needs them; otherwise a host without libaio is not at fault. Raises UnreachableError.
    """
    channel.send("build", operators=list(operators), accelerator="cpu" if on_cpu else "cuda")
    built = [channel.reply(BUILD_S) for _ in operators]
    return [_finding(reply, is_needed) for reply in built], built


def _finding(built: Mapping[str, Any], is_needed: bool) -> Finding:
    check, name = f"prebuild.{built['operator']}", built["operator"]
    if "libaio" in built["error"] and not built["seconds"]:
        text = f"{name} was not built; only offload to disk needs it: {built['error']}"
        return fault(check, text, LIBAIO) if is_needed else ok(check, text)
    if built["error"]:
        return fault(check, f"{name} was not built:\n{built['error']}", "see `tools` above: compiler, ninja, libaio")
    return ok(check, f"{name} in {Path(built['file']).parent}, {built['seconds']:.1f} s")
