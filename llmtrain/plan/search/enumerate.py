"""Enumerates all ways to split a recipe's work over a few devices, both those that run here and the refused ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.axes import CHOSEN, PIPELINE
from llmtrain.plan.draft import divisors
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.installed import check_runnable, is_installed
from llmtrain.plan.plan import Plan
from llmtrain.plan.rules import resolve
from llmtrain.plan.search.variants import (
    DEGREES,
    HPZ,
    MICRO_BATCH,
    NVME_PATH,
    OFFLOADS,
    ONE_STAGE,
    SCHEDULE,
    ZERO_STAGE,
    Fields,
    changed,
    degrees,
    has_mean_loss,
    micro_batches,
    offload_name,
    zero_placements,
)
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster

BACKENDS = {
    "ddp": ("accelerate", "ddp", 0),
    "fsdp2": ("accelerate", "fsdp2", 3),
    "fsdp2-zero2": ("accelerate", "fsdp2", 2),
    **{f"accelerate-zero{stage}": ("accelerate", "deepspeed", stage) for stage in range(4)},
    "horovod": ("horovod", "ddp", 0),
    "data_parallel": ("data_parallel", "ddp", 0),
}
"""Part of a candidate's name → backend, strategy of accelerate, and ZeRO stage."""


@dataclass(frozen=True)
class NamedPlan:
    """A candidate that runs."""

    name: str
    plan: Plan


@dataclass(frozen=True)
class RefusedPlan:
    """A candidate that does not run, and the first rule that it breaks."""

    name: str
    problem: Problem


def candidates(
    recipe: Recipe, nproc: int, device: str = "cpu", layers: float = math.inf, is_mean: bool = False
) -> Iterator[tuple[str, Recipe, Cluster]]:
    """Yields every candidate on 1 to `nproc` devices, legal or not: its name, its recipe and its cluster.

    World sizes divide `nproc`. All combinations of degrees, ZeRO stages and offload to host memory are included, each
    with one micro-batch per step and with several. Offload, hpZ groups and the other backends (if installed) are only
    combined with plain data parallelism, where every stage supports offload. Examples of names:
    `dp2-zero1-acc4-offload`, `dp4-zero3-hpz2-acc4`, `dp2-fsdp2-acc4`. layers: number of layers of the model; schedules
    with more stages are left out. is_mean: as for `micro_batches`.
    """
    recipe = changed(recipe, {"parallel.backend": "deepspeed", "parallel.accelerate": "ddp", NVME_PATH: None})
    for world in divisors(nproc):
        cluster = Cluster(devices_per_node=world, device=device)
        for split, stored in itertools.product(degrees(world), zero_placements(recipe, divisors(world)[1:-1])):
            if split[SCHEDULE[1]] > 1 and split[PIPELINE.field] * split[SCHEDULE[1]] > layers:
                continue
            dp = world // math.prod(split[axis.field] for axis in CHOSEN if axis.has_ranks)
            offload = offload_name(*(stored[field] for field in OFFLOADS))
            if (offload or stored[HPZ] > 1) and any(split[field] > 1 for field in DEGREES):
                continue
            for micro in _micro_batches(recipe, dp, is_mean):
                accumulation = recipe.batch.global_batch_size // (dp * micro)
                hpz = f"-hpz{stored[HPZ]}" if stored[HPZ] > 1 else ""
                name = _name(dp, split, f"{stored[ZERO_STAGE]}{hpz}", accumulation, offload)
                yield name, recipe.with_(**split, **stored, **{MICRO_BATCH: micro}), cluster
        for name, candidate in _replicated(recipe, world, is_mean):
            yield name, candidate, cluster


def enumerate_plans(recipe: Recipe, nproc: int, device: str = "cpu") -> tuple[list[NamedPlan], list[RefusedPlan]]:
    """Returns the candidates that this version can train, and the refused ones."""
    plans, refused = [], []
    facts = model_facts(recipe.model, recipe.vocab_size, recipe.code_dir)
    for name, candidate, cluster in candidates(recipe, nproc, device, facts.layers, has_mean_loss(facts)):
        try:
            plan = resolve(candidate, cluster)
            check_runnable(plan)
        except RecipeError as error:
            refused.append(RefusedPlan(name, error.problems[0]))
        else:
            plans.append(NamedPlan(name, plan))
    return plans, refused


def _replicated(recipe: Recipe, world: int, is_mean: bool) -> Iterator[tuple[str, Recipe]]:
    """Yields data parallelism over all devices with each other backend that is installed."""
    whole = dict.fromkeys((*DEGREES, HPZ), 1) | ONE_STAGE | dict.fromkeys(OFFLOADS, "none")
    sizes = _micro_batches(recipe, world, is_mean)
    for (name, (backend, strategy, stage)), micro in itertools.product(BACKENDS.items(), sizes):
        if not is_installed(backend):
            continue
        fields = whole | {
            "parallel.backend": backend,
            "parallel.accelerate": strategy,
            ZERO_STAGE: stage,
            MICRO_BATCH: micro,
        }
        yield f"dp{world}-{name}-acc{recipe.batch.global_batch_size // (world * micro)}", recipe.with_(**fields)


def _micro_batches(recipe: Recipe, dp: int, is_mean: bool) -> list[int]:
    """Returns two micro-batch sizes: a replica's whole share of the batch, and a smaller size.

    The whole share makes one micro-batch per step. The smaller size is the recipe's if it divides the share, else 1.
    One smaller size is enough.
    """
    sizes, own = micro_batches(recipe, dp, is_mean), recipe.batch.micro_batch_size
    several = own if own in sizes[:-1] else 1
    return sorted({several, *sizes[-1:]} & {*sizes}, reverse=True)


def _name(dp: int, split: Fields, stage: str, accumulation: int, suffix: str) -> str:
    parts = [f"dp{dp}", *(f"{axis.short}{split[axis.field]}" for axis in CHOSEN if split[axis.field] > 1)]
    schedule, chunks = (split[field] for field in SCHEDULE)
    order = f"{schedule}{chunks}" if chunks > 1 else ""
    return "-".join(filter(None, [*parts, order, f"zero{stage}", f"acc{accumulation}", suffix]))
