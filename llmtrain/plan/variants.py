"""Every way to split and store a run on a cluster: the one place that lists degrees, offload and micro-batches.

The rules say which of them are legal. What searches, enumerates or suggests plans takes its values from here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, get_args

from llmtrain.plan.divisors import divisors
from llmtrain.recipe import ParallelConfig, Recipe

Fields = dict[str, Any]
"""Dotted recipe fields, as `Recipe.with_` accepts them."""

DEGREES = PIPELINE, TENSOR, SEQUENCE, EXPERT = (
    "parallel.pipeline",
    "parallel.tensor",
    "parallel.sequence",
    "parallel.expert",
)
ZERO_STAGE = "parallel.zero_stage"
OFFLOADS = ("parallel.offload_optimizer", "parallel.offload_param")
NVME_PATH = "parallel.nvme_path"
CHECKPOINTING = "parallel.activation_checkpointing"
MICRO_BATCH = "batch.micro_batch_size"


def degrees(devices: int, layers: float = math.inf, experts: float = math.inf) -> Iterator[Fields]:
    """All degrees that divide the devices; experts are spread over all ranks that hold the same layers.

    layers, experts: those of the model, which bound the degrees of pipeline and expert parallelism.
    """
    for pipeline in (size for size in divisors(devices) if size <= layers):
        holders = devices // pipeline
        for tensor in divisors(holders):
            for sequence in divisors(holders // tensor):
                for expert in (size for size in divisors(holders) if size <= max(experts, 1)):
                    yield dict(zip(DEGREES, (pipeline, tensor, sequence, expert), strict=True))


def stores(recipe: Recipe) -> Iterator[Fields]:
    """All ZeRO stages, each with all places of optimizer states and parameters."""
    for stage, *places in itertools.product(*(choices(recipe)[field] for field in (ZERO_STAGE, *OFFLOADS))):
        path = recipe.parallel.nvme_path if "nvme" in places else None
        yield {ZERO_STAGE: stage, **dict(zip(OFFLOADS, places, strict=True)), NVME_PATH: path}


def micro_batches(recipe: Recipe, replicas: int) -> tuple[int, ...]:
    """Sizes that divide a replica's share of the batch, the smallest first; none where there is no whole share.

    A router's loss is a mean within each micro-batch, so with it another size than the recipe's is another run.
    """
    share, rest = divmod(recipe.batch.global_batch_size, replicas)
    if rest:
        return ()
    own = recipe.batch.micro_batch_size
    if recipe.model.config.get("output_router_logits"):
        return (own,) if share % own == 0 else ()
    return divisors(share)


def choices(recipe: Recipe) -> dict[str, tuple[Any, ...]]:
    """What each field of `parallel` that is not a degree may become.

    A folder for nvme is not ours to name: states and parameters go there only where the recipe has one.
    """
    path = recipe.parallel.nvme_path
    values: dict[str, tuple[Any, ...]] = {
        f"parallel.{name}": get_args(field.annotation) for name, field in ParallelConfig.model_fields.items()
    }
    for field in OFFLOADS:
        values[field] = ("none", "cpu", "nvme") if path else ("none", "cpu")
    values[NVME_PATH] = (None, path) if path else (None,)
    return values


def offload_name(optimizer: str, parameters: str) -> str:
    """What of a plan is offloaded, in short; empty where nothing is."""
    if (optimizer, parameters) == ("none", "none"):
        return ""
    name = "offload" if parameters == "none" else "offload_param" if optimizer != "none" else "offload_param_only"
    return f"{name}_nvme" if "nvme" in (optimizer, parameters) else name


def value_of(recipe: Recipe, field: str) -> Any:
    """The value of a dotted field of a part."""
    part, _, name = field.partition(".")
    return getattr(getattr(recipe, part), name)


def changed(recipe: Recipe, fields: Fields) -> Recipe:
    """A variant whose types are not checked again, which is what `with_` takes its time for."""
    parts: dict[str, Fields] = {}
    for field, value in fields.items():
        part, _, name = field.partition(".")
        parts.setdefault(part, {})[name] = value
    return recipe.model_copy(
        update={part: getattr(recipe, part).model_copy(update=values) for part, values in parts.items()}
    )
