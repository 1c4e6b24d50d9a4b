"""A plan made small enough for a laptop: every kind of splitting that it has, each over two ranks, on a tiny model.

The rule, all of it:

- a degree above 1 becomes 2: data, pipeline, tensor, sequence and expert parallelism each stay or stay away. That
  makes two to eight ranks, and sixteen where all four of the first are there at once. Where experts have
  replicas under data parallelism they keep them, for which that becomes 4 if nothing else does it, as it does for
  two groups of a hierarchical partition;
- the ZeRO stage, the backend, the optimizer and its clipping, activation checkpointing and the packing stay; so does
  the precision, but fp16 weights, which the engine does not run on CPUs, become bf16; offload stays, but to the host;
- compiled and Liger's kernels give way to plain ones;
- the model keeps its family and its switches and gets tiny sizes (`models.tiny`), `LAYERS` layers for each stage;
- of the batch, at most `ROWS` sequences of `TOKENS` tokens make a micro-batch, at most `MICRO_BATCHES` of them for
  each stage a step: what accumulates still does, and what does not does not.

A plan that is legal stays so: heads, experts and lengths of the copy divide by 2, and no rule asks for more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmtrain.errors import abbreviate
from llmtrain.plan.axes import AXES, CHOSEN, DATA, EXPERT, PIPELINE, SEQUENCE, Axis
from llmtrain.plan.described import triangle
from llmtrain.plan.facts.families import WITHOUT_SDPA
from llmtrain.plan.plan import Plan
from llmtrain.plan.rules import resolve
from llmtrain.recipe import ModelConfig, Part, Recipe
from llmtrain.recipe.cluster import Cluster

MAX_DEGREE = 2
"""Ranks of each kind of parallelism."""
LAYERS = 2
"""Layers of a stage."""
MICRO_BATCHES = 2
"""Micro-batches a step, for each stage: a pipeline gets full and drains."""
ROWS = 2
"""Sequences of a micro-batch."""
MAX_SHOWN = 4
"""Names that a line lists."""
TOKENS = 64
"""Tokens of a sequence."""
ON_CPU = ("eager", "sdpa", "varlen")
"""Attention that trains on a CPU."""
STEPS = 3
"""Optimizer steps."""
PLAIN_BLOCKS = {"compiled": "eager", "liger": "eager"}
PLAIN_LOSS = {"compiled": "chunked", "liger": "chunked"}
"""Kernels for which a laptop may lack a compiler or a device, with replacements that compute the same."""


class Change(Part):
    """A setting that is smaller or different in the small plan."""

    what: str
    """Its name."""
    plan: str
    """Its value in the plan."""
    dry_run: str
    """Its value in the small plan."""
    untested: str
    """Effects that a run of the small plan therefore does not show."""


@dataclass(frozen=True)
class Shrunk:
    """A small plan, and its differences from the full one."""

    plan: Plan
    changes: tuple[Change, ...]


def layers_kept(plan: Plan) -> int:
    """Returns the number of decoder layers of the small model."""
    return min(plan.model.layers, LAYERS * plan.parallel.pipeline_chunks * min(plan.parallel.pipeline, MAX_DEGREE))


def shrink_plan(plan: Plan, model: ModelConfig) -> Shrunk:
    """Returns the small version of a legal plan.

    model: a tiny copy of the plan's model with `layers_kept(plan)` layers, which has its own vocabulary. Raises
    RecipeError if the small plan is not legal, which would be a bug of this module.
    """
    degrees = _degrees(plan)
    cluster = Cluster(devices_per_node=math.prod(degrees[axis] for axis in AXES if axis.has_ranks), device="cpu")
    small = resolve(plan.recipe.with_(**_fields(plan, degrees, model)), cluster)
    return Shrunk(small, tuple(_changes(plan, small)))


def _degrees(plan: Plan) -> dict[Axis, int]:
    small = {axis: min(plan.degree(axis), MAX_DEGREE) for axis in AXES}
    has_replicas = plan.cluster.world_size // plan.divisor("layers") > plan.degree(EXPERT) > 1
    same_layers = math.prod(small[axis] for axis in AXES if axis.has_ranks and "layers" not in axis.divides)
    if has_replicas and plan.data_parallel_size > 1 and same_layers == small[EXPERT]:
        small[DATA] *= MAX_DEGREE
    if plan.parallel.hierarchical_partition > 1 and same_layers == MAX_DEGREE:  # two groups of two
        small[DATA] *= MAX_DEGREE
    if plan.parallel.strategy == "data_parallel":
        small[DATA] = 1  # it only distributes its work over GPUs
    return small


def _fields(plan: Plan, degrees: dict[Axis, int], model: ModelConfig) -> dict[str, Any]:
    """Returns the recipe fields of the small plan."""
    recipe = plan.recipe
    micro_batches = min(plan.batch.gradient_accumulation_steps, MICRO_BATCHES * degrees[PIPELINE])
    rows = min(recipe.batch.micro_batch_size, ROWS)
    parts = math.prod(degree for axis, degree in degrees.items() if "tokens" in axis.divides)
    ring = min(plan.sequence_ring, degrees[SEQUENCE])
    parts *= 2 if ring > 1 else 1  # blocks
    total = rows * micro_batches * degrees[DATA]
    attention = recipe.model.attention_kernel
    if attention not in ON_CPU:
        attention = "eager" if plan.model.text_type in WITHOUT_SDPA else "sdpa"
    return {
        "model": model.model_copy(update={"attention": attention}),
        "kernels.blocks": PLAIN_BLOCKS.get(recipe.kernels.blocks, recipe.kernels.blocks),
        "kernels.fp8": "off",
        "kernels.loss": PLAIN_LOSS.get(recipe.kernels.loss, recipe.kernels.loss),
        "data.tokenizer": {"vocab_size": model.config["vocab_size"]},
        "data.sequence_length": max(min(recipe.data.sequence_length, TOKENS) // parts, 1) * parts,
        "batch.global_batch_size": total,
        "batch.micro_batch_size": rows,
        **{axis.field: degrees[axis] for axis in CHOSEN},
        "parallel.sequence_ring": ring,
        "parallel.hierarchical_partition": min(recipe.parallel.hierarchical_partition, MAX_DEGREE),
        **_types_and_places(recipe),
        # The learning rate's schedule is as short as the run, so that the weights change.
        "train.max_steps": STEPS,
        "train.epochs": None,
        "optim.warmup_steps": 1 if recipe.optim.warmup_steps or recipe.optim.warmup_ratio else 0,
        "optim.warmup_ratio": 0.0,
        "optim.decay_steps": min(recipe.optim.decay_steps, 1),
        "evaluation.max_sequences": total,
        # The few steps are judged by nothing.
        "train.early_stopping": None,
        "checkpoint.keep_best": None,
        "callbacks": [],
    }


def _types_and_places(recipe: Recipe) -> dict[str, Any]:
    """Replaces fp16, which CPUs do not compute in, and offload to disks."""
    parallel = recipe.parallel
    fields: dict[str, Any] = {"parallel.nvme_path": None}
    for name in ("offload_optimizer", "offload_param"):
        fields[f"parallel.{name}"] = "cpu" if getattr(parallel, name) == "nvme" else getattr(parallel, name)
    if parallel.precision == "fp16":
        fields["parallel.precision"] = "bf16"
        if parallel.grad_accum_dtype == "fp16":
            fields["parallel.grad_accum_dtype"] = "bf16"
    return fields


UNTESTED = {
    "data": "sums over more replicas",
    "pipeline": "middle stages, which communicate in both directions",
    "tensor": "narrower slices",
    "sequence": "shorter slices",
    "expert": "exchanges among more ranks",
}
"""Name of an axis, and what more ranks of it would show."""
PLACES = {"offload_optimizer": "optimizer states", "offload_param": "parameters"}


def _changes(plan: Plan, small: Plan) -> Iterator[Change]:
    """Yields all differences; equal values are left out."""
    pairs = [*_degree_pairs(plan, small), *_model_pairs(plan, small), *_run_pairs(plan, small)]
    for what, full, scaled, untested in pairs:
        if full != scaled:
            yield Change(what=what, plan=full, dry_run=scaled, untested=untested)


Pair = tuple[str, str, str, str]


def _degree_pairs(plan: Plan, small: Plan) -> Iterator[Pair]:
    full, scaled = (f"{p.cluster.nodes} × {p.cluster.devices_per_node} {p.cluster.device}" for p in (plan, small))
    yield "devices", full, scaled, "kernels, memory and speed of the devices, their links, NCCL, the launcher"
    for axis in AXES:
        what = axis.name if axis is PIPELINE else f"{axis.name} parallel"
        yield what, str(plan.degree(axis)), str(small.degree(axis)), UNTESTED[axis.name]
    yield "sequence ring", str(plan.sequence_ring), str(small.sequence_ring), "hops between more ranks"
    full, scaled = (f"groups of {p.parallel.hierarchical_partition}" for p in (plan, small))
    yield "hierarchical partition", full, scaled, "gathers among more ranks"


def _model_pairs(plan: Plan, small: Plan) -> Iterator[Pair]:
    full, scaled = (f"{p.model.parameters:,} parameters" for p in (plan, small))
    yield "model", full, scaled, "memory and numerics at full size"
    yield "layers", f"{plan.model.layers}", f"{small.model.layers}", "depth"
    if plan.model.experts:
        full, scaled = (f"{p.model.experts}, {p.model.experts_per_token} a token" for p in (plan, small))
        yield "experts", full, scaled, "load balance among many experts"
    model = plan.recipe.model
    yield "attention", model.attention_kernel, small.recipe.model.attention_kernel, "that kernel"
    full, scaled = (f"blocks {p.recipe.kernels.blocks}, loss {p.recipe.kernels.loss}" for p in (plan, small))
    yield "kernels", full, scaled, "these kernels"
    yield "fp8", plan.recipe.kernels.fp8, small.recipe.kernels.fp8, "products in fp8"
    yield "trained", _trained(model), _trained(small.recipe.model), "whether the patterns select the right modules"
    if model.quantize != "none":
        yield "base weights", model.quantize, "not quantized", "speed and memory of dequantization"
    if model.pretrained:
        yield "weights", model.pretrained, "random", "whether the weights exist and fit the model"


def _trained(model: ModelConfig) -> str:
    if model.adapter is None:
        return abbreviate(model.trainable, MAX_SHOWN) or "all weights"
    targets = model.adapter.pretrained or model.adapter.targets
    saved = f", and {abbreviate(model.adapter.modules_to_save, MAX_SHOWN)}" if model.adapter.modules_to_save else ""
    return f"adapters of {targets if isinstance(targets, str) else abbreviate(targets, MAX_SHOWN)}{saved}"


def _run_pairs(plan: Plan, small: Plan) -> Iterator[Pair]:
    full, scaled = plan.recipe, small.recipe
    yield "data", ", ".join(source.name for source in full.data.sources), "random documents", "corpus and tokenizer"
    yield "sequence", f"{full.data.sequence_length} tokens", f"{scaled.data.sequence_length} tokens", "long attention"
    yield "batch", triangle(plan), triangle(small), "larger sums"
    steps = f"{full.train.epochs} epochs" if full.train.epochs else f"{full.train.steps:,}"
    yield "steps", steps, f"{scaled.train.steps}", "learning, and the learning rate schedule"
    yield "precision", full.parallel.precision, scaled.parallel.precision, "the loss scale and overflows"
    for field, name in PLACES.items():
        devices = (getattr(full.parallel, field), getattr(scaled.parallel, field))
        yield f"{name} in", *devices, "disk reads and writes"
