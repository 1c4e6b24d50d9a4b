"""All ways to split a recipe's work over a few devices: those that run here, and those refused, with the rule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.cluster import Cluster
from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.installed import is_installed
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve import resolve
from llmtrain.plan.runnable import check_runnable
from llmtrain.recipe import Recipe

DEGREES = {"pipeline": "pp", "tensor": "tp", "sequence": "sp", "expert": "ep"}
"""Degree of a recipe → its short form in a candidate's name."""
OFFLOADS = {
    "": ("none", "none"),
    "offload": ("cpu", "none"),
    "offload_param": ("cpu", "cpu"),
}
"""Suffix of a candidate's name → where its optimizer states and its parameters live."""
BACKENDS = {
    "ddp": ("accelerate", "ddp", 0),
    "fsdp2": ("accelerate", "fsdp2", 3),
    "fsdp2-zero2": ("accelerate", "fsdp2", 2),
    **{f"accelerate-zero{stage}": ("accelerate", "deepspeed", stage) for stage in range(4)},
    "horovod": ("horovod", "ddp", 0),
    "data_parallel": ("data_parallel", "ddp", 0),
}
"""Part of a candidate's name → backend, what accelerate runs, and ZeRO stage."""


@dataclass(frozen=True)
class NamedPlan:
    """A candidate that runs."""

    name: str
    plan: Plan


@dataclass(frozen=True)
class Refused:
    """A candidate that does not run, with the first rule that it breaks."""

    name: str
    problem: Problem


def candidates(recipe: Recipe, nproc: int, device: str = "cpu") -> Iterator[tuple[str, Recipe, Cluster]]:
    """Every candidate on 1 to `nproc` devices, legal or not: its name, its recipe and its cluster.

    World sizes divide `nproc`; degrees, ZeRO stages and offload are multiplied out, and each comes
    with one micro-batch per step and with several. Offload is tried under plain data parallelism
    only, where every stage has it, and so are the other backends, those that are installed. Names read as
    `dp2-zero1-acc4-offload`, `dp2-fsdp2-acc4`.
    """
    for world in (size for size in range(1, nproc + 1) if nproc % size == 0):
        cluster = Cluster(devices_per_node=world, device=device)
        for degrees, stage in itertools.product(_degrees(world), range(4)):
            dp = world // (degrees["pipeline"] * degrees["tensor"] * degrees["sequence"])
            suffixes = OFFLOADS if max(degrees.values()) == 1 else [""]
            for accumulation, suffix in itertools.product(_accumulations(recipe, dp), suffixes):
                optimizer, parameters = OFFLOADS[suffix]
                fields = {f"parallel.{name}": degree for name, degree in degrees.items()} | {
                    "parallel.backend": "deepspeed",
                    "parallel.accelerate": "ddp",
                    "parallel.zero_stage": stage,
                    "parallel.offload_optimizer": optimizer,
                    "parallel.offload_param": parameters,
                    "batch.micro_batch_size": recipe.batch.global_batch_size // (dp * accumulation),
                }
                yield _name(dp, degrees, stage, accumulation, suffix), recipe.with_(**fields), cluster
        for name, candidate in _replicated(recipe, world):
            yield name, candidate, cluster


def enumerate_plans(recipe: Recipe, nproc: int, device: str = "cpu") -> tuple[list[NamedPlan], list[Refused]]:
    """The candidates that this version trains, and the others."""
    plans, refused = [], []
    for name, candidate, cluster in candidates(recipe, nproc, device):
        try:
            plan = resolve(candidate, cluster)
            check_runnable(plan)
        except RecipeError as error:
            refused.append(Refused(name, error.problems[0]))
        else:
            plans.append(NamedPlan(name, plan))
    return plans, refused


def _replicated(recipe: Recipe, world: int) -> Iterator[tuple[str, Recipe]]:
    """Data parallelism over all devices, by the other backends that are installed."""
    for (name, (backend, strategy, stage)), accumulation in itertools.product(
        BACKENDS.items(), _accumulations(recipe, world)
    ):
        if not is_installed(backend):
            continue
        fields = {f"parallel.{degree}": 1 for degree in DEGREES} | {
            "parallel.backend": backend,
            "parallel.accelerate": strategy,
            "parallel.zero_stage": stage,
            "parallel.offload_optimizer": "none",
            "parallel.offload_param": "none",
            "batch.micro_batch_size": recipe.batch.global_batch_size // (world * accumulation),
        }
        yield f"dp{world}-{name}-acc{accumulation}", recipe.with_(**fields)


def _degrees(world: int) -> Iterator[dict[str, int]]:
    """All degrees whose product divides the devices; experts may be on all but a pipeline's ranks."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    for pipeline, tensor, sequence, expert in itertools.product(sizes, repeat=4):
        if world % (pipeline * tensor * sequence) == 0 and world // pipeline % expert == 0:
            yield {"pipeline": pipeline, "tensor": tensor, "sequence": sequence, "expert": expert}


def _accumulations(recipe: Recipe, dp: int) -> list[int]:
    """One micro-batch per step, and as many as the recipe has on one device where that divides, else a few.

    A router's loss is a mean within each micro-batch, so with it another size is another run: there
    the recipe's own is the only one. Empty where the global batch does not divide among `dp` replicas.
    """
    share, rest = divmod(recipe.batch.global_batch_size, dp)
    if rest:
        return []
    own = recipe.batch.micro_batch_size
    if recipe.model.config.get("output_router_logits"):
        return [share // own] if share % own == 0 else []
    most = share // own if share % own == 0 and share > own else share
    return sorted({1, most})


def _name(dp: int, degrees: dict[str, int], stage: int, accumulation: int, suffix: str) -> str:
    parts = [f"dp{dp}", *(f"{DEGREES[name]}{degree}" for name, degree in degrees.items() if degree > 1)]
    return "-".join(filter(None, [*parts, f"zero{stage}", f"acc{accumulation}", suffix]))
