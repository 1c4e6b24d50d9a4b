"""Lists every way to split and store a run on a cluster: degrees, offload and micro-batches.

The rules decide which of these are legal. All modules that search, enumerate or suggest plans take the values from this
module.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from llmtrain.plan.axes import CHOSEN, PIPELINE, Axis
from llmtrain.plan.draft import divisors
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.recipe import ParallelConfig, Recipe

Fields = dict[str, Any]
"""Dotted recipe field → value, as accepted by `Recipe.with_`."""

DEGREES = tuple(axis.field for axis in CHOSEN)
SCHEDULE = ("parallel.pipeline_schedule", "parallel.pipeline_chunks")
ONE_STAGE = dict(zip(SCHEDULE, ("1f1b", 1), strict=True))
"""The only schedule without a pipeline."""
ZERO_STAGE = "parallel.zero_stage"
HPZ = "parallel.hierarchical_partition"
OFFLOADS = ("parallel.offload_optimizer", "parallel.offload_param")
NVME_PATH = "parallel.nvme_path"
CHECKPOINTING = "parallel.activation_checkpointing"
CHECKPOINT_EVERY = "parallel.checkpoint_every"
OFFLOAD_INPUTS = "parallel.offload_activations"
MICRO_BATCH = "batch.micro_batch_size"


def degrees(devices: int, layers: float = math.inf, experts: float = math.inf) -> Iterator[Fields]:
    """Yields all degrees that divide the number of devices.

    layers, experts: numbers of the model's layers and experts, which limit the degrees of the axes that split them.
    """

    def splits(axes: Iterable[Axis], among: int) -> Iterator[Fields]:
        values = {axis.field: sizes(axis, among, layers, experts) for axis in axes}
        return (dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))

    for split in splits((axis for axis in CHOSEN if axis.has_ranks), devices):
        if devices % math.prod(split.values()) == 0:
            # The groups of other axes are subsets of the ranks that hold the same layers.
            for subsets in splits((axis for axis in CHOSEN if not axis.has_ranks), devices // split[PIPELINE.field]):
                for schedule in schedules(split[PIPELINE.field], layers):
                    yield split | subsets | schedule


def sizes(axis: Axis, devices: int, layers: float = math.inf, experts: float = math.inf) -> list[int]:
    """Returns the degrees of one axis that divide the number of devices, with the limits of `degrees`."""
    counts = {"layers": layers, "experts": max(experts, 1)}
    most = min((counts[what] for what in axis.divides & counts.keys() if axis.divides == {what}), default=math.inf)
    return [size for size in divisors(devices) if size <= most]


def schedules(pipeline: int, layers: float = math.inf) -> Iterator[Fields]:
    """Yields the schedules of a pipeline of `pipeline` devices, without those that need more stages than layers.

    Each schedule has its smallest number of stages, and the zero bubble schedule also twice as many. More stages would
    hardly reduce the waiting, but would send as much data again.
    """
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2), ("zero_bubble", 4)):
        if chunks == 1 or (pipeline > 1 and pipeline * chunks <= layers):
            yield dict(zip(SCHEDULE, (name, chunks), strict=True))


def zero_placements(recipe: Recipe, groups: Sequence[int] = ()) -> Iterator[Fields]:
    """Yields all ZeRO stages, each with all locations of optimizer states and parameters.

    groups: sizes of hpZ groups, whose ranks hold the parameters of ZeRO-3 a second time, if nothing is offloaded.
    """
    for stage, *places in itertools.product(*(choices(recipe)[field] for field in (ZERO_STAGE, *OFFLOADS))):
        path = recipe.parallel.nvme_path if "nvme" in places else None
        for group in (1, *groups) if (stage, *places) == (3, "none", "none") else (1,):
            yield {ZERO_STAGE: stage, HPZ: group, **dict(zip(OFFLOADS, places, strict=True)), NVME_PATH: path}


def recomputations(recipe: Recipe) -> Iterator[Fields]:
    """Yields the options for recomputation: each kind for all layers, and the recipe's own choice.

    Only the recipe can choose to recompute every k-th layer or to keep inputs in host memory, because predictions put
    no price on the cores and the memory of a host.
    """
    kinds = choices(recipe)[CHECKPOINTING]
    plain = [{CHECKPOINTING: kind, CHECKPOINT_EVERY: 1, OFFLOAD_INPUTS: False} for kind in kinds]
    own = {field: value_of(recipe, field) for field in plain[0]}
    yield from (plain if own in plain else [*plain, own])


def has_mean_loss(facts: ModelFacts) -> bool:
    """Whether a loss of routers, or of a user's own model, is added that is a mean within each micro-batch."""
    return facts.router_loss or (facts.trials is not None and facts.trials.auxiliary_loss)


def micro_batches(recipe: Recipe, replicas: int, is_mean: bool) -> tuple[int, ...]:
    """Returns the micro-batch sizes that divide a replica's share of the batch, smallest first.

    Returns an empty tuple if the share is not an integer. is_mean: as returned by `has_mean_loss`; then only the
    recipe's size is returned, because another size would be another run.
    """
    share, rest = divmod(recipe.batch.global_batch_size, replicas)
    if rest:
        return ()
    own = recipe.batch.micro_batch_size
    if is_mean:
        return (own,) if share % own == 0 else ()
    return divisors(share)


def choices(recipe: Recipe) -> dict[str, tuple[Any, ...]]:
    """Returns the possible values of each field of `parallel` that is not a degree.

    The user chooses the folder for NVMe, so offload to NVMe is only included if the recipe has such a folder.
    """
    path = recipe.parallel.nvme_path
    values: dict[str, tuple[Any, ...]] = {
        f"parallel.{name}": get_args(field.annotation) for name, field in ParallelConfig.model_fields.items()
    }
    for field in OFFLOADS:
        values[field] = ("none", "cpu", "nvme") if path else ("none", "cpu")
    values |= {HPZ: (1,), CHECKPOINT_EVERY: (1,), OFFLOAD_INPUTS: (False, True), "parallel.tiled_mlp": (False,)}
    values[NVME_PATH] = (None, path) if path else (None,)
    return values


def offload_name(optimizer: str, parameters: str) -> str:
    """Returns an abbreviation of what a plan offloads; empty if it offloads nothing."""
    if (optimizer, parameters) == ("none", "none"):
        return ""
    name = "offload" if parameters == "none" else "offload_param" if optimizer != "none" else "offload_param_only"
    return f"{name}_nvme" if "nvme" in (optimizer, parameters) else name


def value_of(recipe: Recipe, field: str) -> Any:
    """Returns the value of a dotted recipe field."""
    part, _, name = field.partition(".")
    return getattr(getattr(recipe, part), name)


def changed(recipe: Recipe, fields: Fields) -> Recipe:
    """Returns a recipe with changed fields. Unlike `with_`, it skips the slow validation of types."""
    parts: dict[str, Fields] = {}
    for field, value in fields.items():
        part, _, name = field.partition(".")
        parts.setdefault(part, {})[name] = value
    return recipe.model_copy(
        update={part: getattr(recipe, part).model_copy(update=values) for part, values in parts.items()}
    )
