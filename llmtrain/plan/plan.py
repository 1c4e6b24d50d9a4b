"""The plan: a recipe on a cluster, with concrete values for every degree and batch size."""

from __future__ import annotations

import math
from typing import Any, Self

from pydantic import Field, model_validator

from llmtrain.plan.axes import AXES, DATA, INNERMOST_FIRST, Axis, Divided, model_parallel_size, ring_degree
from llmtrain.plan.facts.families import MEGATRON_SP_FAMILIES
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.facts.own_code import OwnCode
from llmtrain.plan.facts.own_optimizer import TriedOptimizer
from llmtrain.plan.optimizers import OptimizerRow, optimizer_of
from llmtrain.recipe import ParallelConfig, Part, Recipe
from llmtrain.recipe.cluster import Cluster

MAX_LAYERS = 100_000
"""Largest number of decoder layers of a plan; rules report much smaller ones."""
SHORTENED_TO = 8
"""Shortened micro-batches have a multiple of this many columns, for which GPUs have fast kernels. So have continued
prompts."""


class Batch(Part):
    """The batch triangle: global = micro × accumulation × data parallel size."""

    global_batch_size: int
    """Sequences per optimizer step."""
    micro_batch_size: int
    """Sequences per forward pass on one device."""
    gradient_accumulation_steps: int
    """Forward passes per optimizer step."""
    tokens_per_step: int
    """Tokens read per optimizer step, padding included."""


class StagePlan(Part):
    """A pipeline stage."""

    layers: tuple[int, int]
    """The first and the last decoder layer, counted from 0."""
    parameters: int
    """Parameters on its ranks, embedding and head included; a tied head counts on its own stage, too."""
    cost_share: float
    """Its share of the FLOPs of a step; 1 / pp if all stages are balanced."""


class KernelChoice(Part):
    """The kernels of a run whose recipe leaves them open (`auto`), and how they were chosen."""

    key: str
    """Key of the device, the packages and the shapes that the choice is valid for
    (`llmtrain.train.tune.choice.key_of_run`)."""
    device: str
    """The device that the choice was made on."""
    why: str
    """Origin of the choice: a measurement, or the rules, and the reason."""
    values: dict[str, str | int]
    """Dotted fields of the recipe and their values; fields that are missing here follow the rules."""
    milliseconds: dict[str, dict[str, float]] = Field(default_factory=dict)
    """For each measured field, each value's time for a micro-batch's forward and backward pass through a few layers. A
    field that is not in `values` was measured for information only. Times of other micro-batches are for as many
    sequences as that of the recipe."""
    failed: dict[str, str] = Field(default_factory=dict)
    """FIELD=VALUE and why it could not be measured."""


class Plan(Part):
    """Recipe × cluster, resolved: everything that a worker and a launcher need."""

    recipe: Recipe
    cluster: Cluster
    batch: Batch
    model: ModelFacts
    stages: tuple[StagePlan, ...] = Field(default=())
    """The stages of a pipeline; empty without one."""
    flops_per_token: float
    """Model FLOPs of forward and backward per token, without recomputation: 6·N + 12·L·d·T."""
    notes: tuple[dict[str, str], ...] = Field(default=())
    """Remarks about a legal plan, as `Problem` dictionaries."""
    code: OwnCode | None = None
    """Files and versions of the recipe's own code; None if there is none."""
    optimizer: TriedOptimizer | None = None
    """What a trial of the recipe's own optimizer found; None if the optimizer is one of llmtrain."""
    kernels: KernelChoice | None = None
    """The kernels of a run whose recipe leaves some open; None until it has started."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Raises ValueError for a plan from a file that no recipe leads to, with which predictions would never end."""
        runs = self.model.weights.layers if self.model.weights else self.model.layers
        if not 0 <= self.model.layers == runs <= MAX_LAYERS:
            raise ValueError(f"has {self.model.layers} layers, and weights of {runs}, of at most {MAX_LAYERS:,}")
        if self.data_parallel_size < 1 or self.batch.gradient_accumulation_steps < 1:
            raise ValueError("has fewer devices, or a smaller batch, than its layout needs")
        return self

    @property
    def parallel(self) -> ParallelConfig:
        """The recipe's parallelism."""
        return self.recipe.parallel

    @property
    def optimizer_row(self) -> OptimizerRow:
        """The row of the recipe's optimizer."""
        return optimizer_of(self.recipe.optim, self.optimizer)

    @property
    def data_parallel_size(self) -> int:
        """The number of replicas, which read different samples."""
        return self.cluster.world_size // model_parallel_size(self.parallel)

    def degree(self, axis: Axis) -> int:
        """Returns the degree of an axis."""
        return self.data_parallel_size if axis is DATA else axis.degree(self.parallel)

    def stride(self, axis: Axis) -> int:
        """Returns the distance between neighbours in a group of an axis: ranks are numbered by `INNERMOST_FIRST`."""
        inner = INNERMOST_FIRST[: INNERMOST_FIRST.index(axis)]
        return math.prod(self.degree(nearer) for nearer in inner)

    def divisor(self, divided: Divided) -> int:
        """Returns the number by which the axes divide the layers, the matrices of a layer, and so on."""
        return math.prod(self.degree(axis) for axis in AXES if divided in axis.divides)

    @property
    def sequence_ring(self) -> int:
        """The number of groups of sequence parallel ranks that form a ring; the ranks of a group divide the heads."""
        return ring_degree(self.parallel, self.model)

    @property
    def head_ranks(self) -> int:
        """The number of sequence parallel ranks that divide the heads while attention runs (Ulysses)."""
        return self.parallel.sequence // self.sequence_ring

    @property
    def gradient_ranks(self) -> int:
        """The number of ranks over which gradients are averaged: those with the same weights, experts excepted."""
        return self.cluster.world_size // (self.divisor("layers") * self.divisor("matrices"))

    def layout(self) -> dict[str, int]:
        """Returns all degrees by the abbreviations of their axes, and the ZeRO stage; for output."""
        return {axis.short: self.degree(axis) for axis in AXES} | {"zero_stage": self.parallel.zero_stage}

    @property
    def workers(self) -> int:
        """Number of processes: one per device, or a single one if `nn.DataParallel` drives all devices."""
        return 1 if self.recipe.parallel.strategy == "data_parallel" else self.cluster.world_size

    @property
    def readers(self) -> int:
        """Number of replicas, or groups of them in one process, that read their own samples."""
        return self.data_parallel_size * self.workers // self.cluster.world_size

    @property
    def shortens_batches(self) -> bool:
        """Whether a micro-batch is only as long as its targets need.

        True if sequences are not packed and nothing requires equal lengths. The balancing loss of experts does, because
        it is a mean over all tokens.
        """
        recipe = self.recipe
        return (
            recipe.data.packing == "none"
            and not recipe.objective.reads_completions
            and not self.model.experts
            and not self.has_one_shape
            and self.parallel.backend == "deepspeed"
        )

    @property
    def has_one_shape(self) -> bool:
        """Whether all micro-batches must have the same shape.

        Stages and slices exchange tensors of one size, and compiled kernels are compiled for it.
        """
        kernels = self.recipe.kernels
        return self.parallel.pipeline * self.parallel.sequence > 1 or "compiled" in (kernels.blocks, kernels.loss)

    @property
    def megatron_sp_ranks(self) -> int:
        """Number of ranks of Megatron's sequence parallelism (arXiv 2205.05198), which are those of tensor parallelism.

        Each holds a slice of the residual stream between attention and feed-forward; 1 if each holds all of it.

        The length of every micro-batch has to be divisible among them. Before distributed experts, all ranks have all
        tokens, and a feed-forward layer in tiles would sum the gradients of its bias once for each tile.
        """
        ranks, length = self.parallel.tensor, self.recipe.data.sequence_length // self.parallel.sequence
        divides = length % ranks == 0 and (self.has_one_shape or SHORTENED_TO % ranks == 0)
        is_able = self.model.model_type in MEGATRON_SP_FAMILIES and not self.parallel.tiled_mlp
        is_able = is_able and self.parallel.expert == 1
        return ranks if divides and is_able else 1

    @property
    def read_size(self) -> int:
        """Sequences that a process reads per forward pass: the micro-batches of its devices, concatenated."""
        return self.batch.micro_batch_size * self.data_parallel_size // self.readers

    def summary(self) -> dict[str, Any]:
        """Returns the plan as `llmtrain plan --json` prints it, without the engine's configuration."""
        stages = [stage.model_dump(mode="json") for stage in self.stages]
        return {
            "legal": True,
            "recipe": self.recipe.name,
            "cluster": self.cluster.model_dump(),
            "backend": self.recipe.parallel.backend,
            "strategy": self.recipe.parallel.strategy,
            "workers": self.workers,
            "layout": self.layout() | ({"stages": stages} if stages else {}),
            "megatron_sp_ranks": self.megatron_sp_ranks,
            "batch": self.batch.model_dump(),
            "model": self.model.model_dump(exclude={"weights"}),
            "flops_per_token": self.flops_per_token,
            "notes": list(self.notes),
        }
