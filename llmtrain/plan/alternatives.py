"""The values that a kernel field which a recipe leaves open may have: those that no rule refuses; pure."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.errors import RecipeError
from llmtrain.plan.kernels import chunks_loss
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve import resolve
from llmtrain.recipe import Recipe

THREADS, ATTENTION, BLOCKS, LOSS = "kernels.threads", "model.attention", "kernels.blocks", "kernels.loss"
KERNELS = (THREADS, ATTENTION, BLOCKS, LOSS)
"""The fields in which a recipe can leave its kernels open, in the order in which they are chosen."""
AUTO = "auto"


def open_kernels(recipe: Recipe) -> tuple[str, ...]:
    """Returns those of `KERNELS` that a recipe leaves open."""
    values = recipe.dotted()
    return tuple(field for field in KERNELS if values[field] == AUTO)


def alternatives(plan: Plan, on_cpu: bool, threads: int) -> Iterator[tuple[str, list[str | int]]]:
    """Of each open field the values to be tried: first the one that holds without a measurement.

    threads: that a rank on a CPU may have.
    """
    fields = open_kernels(plan.recipe)
    for field, values in _values(plan, on_cpu, threads).items():
        if field in fields:
            yield field, [values[0], *(value for value in values[1:] if _is_legal(plan, field, value))]


def _values(plan: Plan, on_cpu: bool, threads: int) -> dict[str, list[str | int]]:
    # No "eager" on a GPU: its memory grows with the square of the sequence, and it was never the faster one there.
    attention = (
        ("varlen", "eager") if on_cpu else ("varlen", "flash_attention_2", "flash_attention_3", "flex_attention")
    )
    blocks = ("compiled",) if on_cpu else ("compiled", "liger")
    # All logits are held at once only if the plan's memory has room for them.
    losses = ("chunked",) if chunks_loss(plan) else ("whole", "chunked")
    return {
        **({THREADS: [threads, *_halves(threads)]} if on_cpu else {}),
        ATTENTION: [plan.recipe.model.attention_kernel, *attention],
        BLOCKS: ["eager", *blocks],
        LOSS: [*losses, "compiled", *(() if on_cpu else ("liger",))],
    }


def _halves(threads: int) -> Iterator[int]:
    while threads > 1:
        threads //= 2
        yield threads


def _is_legal(plan: Plan, field: str, value: str | int) -> bool:
    try:
        resolve(plan.recipe.with_(**{field: value}), plan.cluster, plan.model)
    except RecipeError:
        return False
    return True
