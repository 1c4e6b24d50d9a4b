"""Every way to split and store a run on a cluster: the one place that lists degrees, offload and micro-batches.

The rules decide which of them are legal. Everything that searches, enumerates or suggests plans takes its values from
here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from llmtrain.plan.axes import CHOSEN, PIPELINE, Axis
from llmtrain.plan.draft import divisors
from llmtrain.recipe import ParallelConfig, Recipe

Fields = dict[str, Any]
"""Dotted recipe fields, as `Recipe.with_` accepts them."""

DEGREES = tuple(axis.field for axis in CHOSEN)
SCHEDULE = ("parallel.pipeline_schedule", "parallel.pipeline_chunks")
ONE_STAGE = dict(zip(SCHEDULE, ("1f1b", 1), strict=True))
"""The only schedule without a pipeline."""
ZERO_STAGE = "parallel.zero_stage"
HIERARCHY = "parallel.hierarchical_partition"
OFFLOADS = ("parallel.offload_optimizer", "parallel.offload_param")
NVME_PATH = "parallel.nvme_path"
CHECKPOINTING = "parallel.activation_checkpointing"
EVERY = "parallel.checkpoint_every"
OFFLOAD_INPUTS = "parallel.offload_activations"
MICRO_BATCH = "batch.micro_batch_size"


def degrees(devices: int, layers: float = math.inf, experts: float = math.inf) -> Iterator[Fields]:
    """Yields all degrees that divide the devices.

    layers, experts: those of the model, which bound the degrees of the axes that divide them.
    """
    counts = {"layers": layers, "experts": max(experts, 1)}
    ranks = [axis for axis in CHOSEN if axis.has_ranks]
    subsets = [axis for axis in CHOSEN if not axis.has_ranks]

    def sizes(axis: Axis, among: int) -> list[int]:
        most = min((counts[what] for what in axis.divides & counts.keys() if axis.divides == {what}), default=math.inf)
        return [size for size in divisors(among) if size <= most]

    def splits(axes: list[Axis], among: int) -> Iterator[Fields]:
        if not axes:
            yield {}
            return
        for size in sizes(axes[0], among):
            for rest in splits(axes[1:], among // size):
                yield {axes[0].field: size} | rest

    for split in splits(ranks, devices):
        holders = devices // math.prod(split[axis.field] for axis in ranks if "layers" in axis.divides)
        for chosen in itertools.product(*(sizes(axis, holders) for axis in subsets)):
            sizes_of_subsets = {axis.field: size for axis, size in zip(subsets, chosen, strict=True)}
            for schedule in schedules(split[PIPELINE.field], layers):
                yield split | sizes_of_subsets | schedule


def schedules(pipeline: int, layers: float = math.inf) -> Iterator[Fields]:
    """Yields the schedules of a pipeline of so many devices; more stages than layers are left out.

    Each has the fewest stages that it can have, and the zero bubble schedule also twice as many: further ones wait
    little less, and send as much again.
    """
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2), ("zero_bubble", 4)):
        if chunks == 1 or (pipeline > 1 and pipeline * chunks <= layers):
            yield dict(zip(SCHEDULE, (name, chunks), strict=True))


def stores(recipe: Recipe, groups: Sequence[int] = ()) -> Iterator[Fields]:
    """Yields all ZeRO stages, each with all places of optimizer states and parameters.

    groups: numbers of ranks that may keep the parameters of ZeRO-3 once more, if nothing is offloaded.
    """
    for stage, *places in itertools.product(*(choices(recipe)[field] for field in (ZERO_STAGE, *OFFLOADS))):
        path = recipe.parallel.nvme_path if "nvme" in places else None
        for group in (1, *groups) if (stage, *places) == (3, "none", "none") else (1,):
            yield {ZERO_STAGE: stage, HIERARCHY: group, **dict(zip(OFFLOADS, places, strict=True)), NVME_PATH: path}


def recomputations(recipe: Recipe) -> Iterator[Fields]:
    """Yields what may be computed again: each choice for all layers, and what the recipe asks for.

    Its every k-th layer, and host memory for inputs, are the user's choice: predictions price neither the cores nor the
    memory of a host.
    """
    kinds = choices(recipe)[CHECKPOINTING]
    plain = [{CHECKPOINTING: kind, EVERY: 1, OFFLOAD_INPUTS: False} for kind in kinds]
    own = {field: value_of(recipe, field) for field in plain[0]}
    yield from (plain if own in plain else [*plain, own])


def micro_batches(recipe: Recipe, replicas: int) -> tuple[int, ...]:
    """Returns the sizes that divide a replica's share of the batch, smallest first; empty if it is not an integer.

    A router's loss is a mean within each micro-batch: with such a loss, another size than the recipe's would be another
    run.
    """
    share, rest = divmod(recipe.batch.global_batch_size, replicas)
    if rest:
        return ()
    own = recipe.batch.micro_batch_size
    if recipe.model.config.get("output_router_logits"):
        return (own,) if share % own == 0 else ()
    return divisors(share)


def choices(recipe: Recipe) -> dict[str, tuple[Any, ...]]:
    """Returns the possible values of each field of `parallel` that is not a degree.

    The folder for nvme is the user's choice: states and parameters are offloaded there only if the recipe has one.
    """
    path = recipe.parallel.nvme_path
    values: dict[str, tuple[Any, ...]] = {
        f"parallel.{name}": get_args(field.annotation) for name, field in ParallelConfig.model_fields.items()
    }
    for field in OFFLOADS:
        values[field] = ("none", "cpu", "nvme") if path else ("none", "cpu")
    values |= {HIERARCHY: (1,), EVERY: (1,), OFFLOAD_INPUTS: (False, True), "parallel.tiled_mlp": (False,)}
    values[NVME_PATH] = (None, path) if path else (None,)
    return values


def offload_name(optimizer: str, parameters: str) -> str:
    """Returns an abbreviation for what a plan offloads, or an empty string."""
    if (optimizer, parameters) == ("none", "none"):
        return ""
    name = "offload" if parameters == "none" else "offload_param" if optimizer != "none" else "offload_param_only"
    return f"{name}_nvme" if "nvme" in (optimizer, parameters) else name


def value_of(recipe: Recipe, field: str) -> Any:
    """Returns the value of a dotted field of a part."""
    part, _, name = field.partition(".")
    return getattr(getattr(recipe, part), name)


def changed(recipe: Recipe, fields: Fields) -> Recipe:
    """Returns a variant without validating its types again, which is what takes time in `with_`."""
    parts: dict[str, Fields] = {}
    for field, value in fields.items():
        part, _, name = field.partition(".")
        parts.setdefault(part, {})[name] = value
    return recipe.model_copy(
        update={part: getattr(recipe, part).model_copy(update=values) for part, values in parts.items()}
    )
