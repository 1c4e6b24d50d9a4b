"""The kernels that a recipe leaves open: the values that no rule refuses, and the cache of measured choices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from llmtrain.data.cache import cache_folder, key_of
from llmtrain.engines.runtime.cpu import matmul_of
from llmtrain.plan import KernelChoice, Plan
from llmtrain.plan.kernels import chunks_loss
from llmtrain.plan.rules import resolves
from llmtrain.recipe import DataConfig, Recipe
from llmtrain.run_dir import versions
from llmtrain.system.durable import write_atomically
from llmtrain.system.host import available_cores, processor_name
from llmtrain.system.untrusted import UNREADABLE, read_json

PACKAGES = ("torch", "transformers", "triton", "liger-kernel", "flash-attn", "kernels", "torchao")
"""Packages whose versions determine the kernels and their speed."""


def device_name(device: torch.device, threads: int) -> str:
    """Returns what a measurement is valid for: the GPU, or the processor and the number of threads of a rank."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    return f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads"


def threads_of_a_rank(local_world_size: int) -> int:
    """Returns the number of cores for a rank if `local_world_size` ranks share this process's cores."""
    return max(1, available_cores() // local_world_size)


def key_of_run(plan: Plan, device: str) -> str:
    """Returns a key of exactly what determines the fastest kernels for a plan's steps."""
    recipe = plan.recipe
    data = {"sequence_length": recipe.data.sequence_length, "mask_documents": recipe.data.has_document_mask}
    return key_of(
        device,
        versions(PACKAGES),
        recipe.model.model_dump(mode="json"),
        recipe.vocab_size,
        data,
        plan.read_size,
        recipe.parallel.model_dump(mode="json"),
        recipe.kernels.model_dump(mode="json"),
    )


def cached_file(data: DataConfig, key: str) -> Path:
    """Returns the file of a measured choice."""
    return cache_folder(data) / "kernels" / f"{key}.json"


def read_cached(data: DataConfig, key: str) -> KernelChoice | None:
    """Returns the measured choice of a key, or None if there is no readable one."""
    try:
        return read_json(cached_file(data, key), KernelChoice)
    except UNREADABLE:
        return None


def write_cached(data: DataConfig, choice: KernelChoice) -> None:
    """Stores a measured choice."""
    file = cached_file(data, choice.key)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(choice.model_dump(mode="json"), indent=2) + "\n")


def apply(plan: Plan, choice: KernelChoice) -> Plan:
    """Returns the plan with the chosen kernels set in its recipe."""
    return plan.model_copy(update={"recipe": plan.recipe.with_(**choice.values), "kernels": choice})


THREADS, MATMUL = "kernels.threads", "kernels.matmul"
ATTENTION, BLOCKS, LOSS = "model.attention", "kernels.blocks", "kernels.loss"
KERNELS = (THREADS, MATMUL, BLOCKS, ATTENTION, LOSS)
"""The fields in which a recipe can leave its kernels open, in the order in which they are chosen. Attention comes after
the layers, since flash kernels end a compiled layer's graph, and `varlen` does not."""


def open_kernels(recipe: Recipe) -> tuple[str, ...]:
    """Returns those of `KERNELS` that a recipe leaves open."""
    values = recipe.dotted()
    return tuple(field for field in KERNELS if values[field] == "auto")


def alternatives(plan: Plan, on_cpu: bool, threads: int) -> Iterator[tuple[str, list[str | int]]]:
    """Returns the values to try for each open field; the first one is the value without a measurement.

    threads: that a rank on a CPU may have.
    """
    fields = open_kernels(plan.recipe)
    for field, values in _values(plan, on_cpu, threads).items():
        if field in fields:
            legal = (value for value in values[1:] if resolves(plan.recipe, plan.cluster, plan.model, {field: value}))
            yield field, [values[0], *legal]


def _values(plan: Plan, on_cpu: bool, threads: int) -> dict[str, list[str | int]]:
    # No "eager" on a GPU: its memory grows with the square of the sequence, and it was never the faster one there.
    attention = (
        ("varlen", "eager") if on_cpu else ("varlen", "flash_attention_2", "flash_attention_3", "flex_attention")
    )
    blocks = ("compiled",) if on_cpu else ("compiled", "liger")
    # All logits are held at once only if the plan's memory has room for them.
    losses = ("chunked",) if chunks_loss(plan) else ("whole", "chunked")
    return {
        **({THREADS: [threads, *_halves(threads)], MATMUL: _matmul(plan)} if on_cpu else {}),
        BLOCKS: ["eager", *blocks],
        ATTENTION: [plan.recipe.model.attention_kernel, *attention],
        LOSS: [*losses, "compiled", *(() if on_cpu else ("liger",))],
    }


def _matmul(plan: Plan) -> list[str | int]:
    default = matmul_of(plan)
    return [default, "torch" if default == "onednn" else "onednn"]


def _halves(threads: int) -> Iterator[int]:
    while threads > 1:
        threads //= 2
        yield threads
