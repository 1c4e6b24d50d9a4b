"""Computation time of a device: seconds per micro-batch of a pipeline stage, and of an update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llmtrain.plan.draft import BYTES_OF, COMPUTE_DTYPE, WEIGHT_DTYPE
from llmtrain.plan.facts.model import ModelFacts
from llmtrain.plan.flops import backward_layers, head_parameters, table_parameters
from llmtrain.plan.kernels import chunks_loss, feeds_in_tiles, is_one_chunk, recomputes_loss
from llmtrain.plan.optimizers import OWN_TEMPORARIES, UPDATE_BYTES, MuonOptions, states_kept
from llmtrain.plan.plan import Plan, StagePlan
from llmtrain.plan.predict.assumptions import Assumptions
from llmtrain.plan.predict.rates import AchievedRates
from llmtrain.plan.schedules import PipelineSchedule

BACKWARD = 2.0
"""Matrix products of a backward pass for each one of the forward pass, if the weight is trained; also the passes over
memory."""
ATTENTION_BACKWARD = 2.5
"""The same for a fused attention kernel, which computes the scores again (FlashAttention, arXiv 2205.14135)."""


@dataclass(frozen=True)
class StageParameters:
    """The parameters on a rank of the pipe, before tensor or expert parallelism splits them."""

    layers: int
    active: int
    """Parameters of its layers that a token uses."""
    parameters: int
    """All parameters, embedding and head included."""
    experts: int
    """Those of `parameters` that expert parallelism distributes."""
    trained: float
    """Fraction of `parameters` that is trained."""
    reached: float
    """Fraction of the layers that the backward pass reaches."""
    embedding: bool
    """Whether it has the embedding."""
    head: bool
    """Whether it has the output projection."""


def parameters_of_ranks(plan: Plan) -> tuple[StageParameters, ...]:
    """Returns what each rank of the pipe holds in turn: the stages that the schedule gives it, or the whole model."""
    stages = parameters_of_stages(plan.model, plan.stages)
    if plan.parallel.pipeline_chunks == 1:
        return stages
    schedule = PipelineSchedule.of(plan.parallel)
    return tuple(_joined([stages[stage] for stage in schedule.stages_of(rank)]) for rank in range(schedule.ranks))


def _joined(stages: Sequence[StageParameters]) -> StageParameters:
    layers, parameters = sum(stage.layers for stage in stages), sum(stage.parameters for stage in stages)
    return StageParameters(
        layers=layers,
        active=sum(stage.active for stage in stages),
        parameters=parameters,
        experts=sum(stage.experts for stage in stages),
        trained=sum(stage.trained * stage.parameters for stage in stages) / parameters,
        reached=sum(stage.reached * stage.layers for stage in stages) / layers,
        embedding=any(stage.embedding for stage in stages),
        head=any(stage.head for stage in stages),
    )


@lru_cache(maxsize=4096)
def parameters_of_stages(facts: ModelFacts, stages: tuple[StagePlan, ...]) -> tuple[StageParameters, ...]:
    """Returns every stage in turn, or the whole model if there are none."""
    if not stages:
        outside = facts.embedding_parameters + (0 if facts.tied_embeddings else head_parameters(facts))
        trained = facts.trained_parameters
        whole = StageParameters(
            layers=facts.layers,
            active=facts.active_parameters - outside,
            parameters=facts.parameters,
            experts=_experts(facts, 0, facts.layers),
            trained=1.0 if trained is None else trained / facts.parameters,
            reached=backward_layers(facts) / facts.layers,
            embedding=True,
            head=True,
        )
        return (whole,)
    found = []
    below = facts.layers - backward_layers(facts)
    for number, stage in enumerate(stages):
        first, last = stage.layers[0], stage.layers[1] + 1
        is_last, share = number == len(stages) - 1, 1.0
        if facts.weights is not None and facts.trained_parameters is not None:
            own = facts.weights.of_layers(first, last, first=number == 0, last=is_last)
            share = sum(weight.elements for weight in own if weight.trained) / stage.parameters
        part = StageParameters(
            layers=last - first,
            active=sum(facts.layer_parameters[first:last]) - sum(facts.layer_idle_parameters[first:last]),
            parameters=stage.parameters,
            experts=_experts(facts, first, last),
            trained=share,
            reached=(last - max(first, min(below, last))) / (last - first),
            embedding=number == 0,
            head=is_last,
        )
        found.append(part)
    return tuple(found)


def _experts(facts: ModelFacts, first: int, last: int) -> int:
    """Returns the parameters of all experts in some layers, whether a token is routed to them or not."""
    idle = sum(facts.layer_idle_parameters[first:last])
    missed = facts.experts - facts.experts_per_token
    return idle * facts.experts // missed if missed else 0


@dataclass(frozen=True)
class Work:
    """Seconds of a device for a micro-batch."""

    forward: float
    recompute: float
    """Seconds of computing again: the layers' forward pass under activation checkpointing, and the head's for a loss in
    chunks."""
    backward: float

    @property
    def seconds(self) -> float:
        """Sum of all parts."""
        return self.forward + self.recompute + self.backward


class DeviceShare:
    """The tokens and weights of one device of a plan, independent of the device's speed."""

    def __init__(self, plan: Plan, micro_batch: int | None = None) -> None:
        """micro_batch: its number of sequences; by default the plan's."""
        recipe = plan.recipe
        self.plan, self.facts = plan, plan.model
        self.tokens = (
            (micro_batch or plan.batch.micro_batch_size) * recipe.data.sequence_length / plan.divisor("tokens")
        )
        """Tokens of a micro-batch."""
        self.compute_bytes = BYTES_OF[COMPUTE_DTYPE[recipe.parallel.precision]]
        self.weight_bytes = BYTES_OF[WEIGHT_DTYPE[recipe.parallel.precision]]
        self.gradient_bytes = BYTES_OF[recipe.parallel.grad_accum_dtype]
        self.again = recipe.parallel.activation_checkpointing
        """The part that is recomputed in the backward pass."""

    def recomputed_layers(self, stage: StageParameters) -> int:
        """Returns the layers of a stage that are computed again, in whole or in part."""
        return 0 if self.again == "none" else math.ceil(stage.layers / self.plan.parallel.checkpoint_every)

    def layer_matrix_fraction(self, stage: StageParameters) -> float:
        """Returns the fraction of a stage that the optimizer updates as matrices of layers; their norms count, too."""
        if self.plan.optimizer_row.layer_states is None:
            return 0.0
        return min(1.0, sum(self.facts.layer_parameters) / self.facts.layers * stage.layers / stage.parameters)

    def device_parameters(self, stage: StageParameters) -> float:
        """Returns the parameters of a stage on one device, if only tensor and expert parallelism split them."""
        return sum(self.dense_and_expert_parameters(stage))

    def dense_and_expert_parameters(self, stage: StageParameters) -> tuple[float, float]:
        """Returns the part of `device_parameters` that all replicas hold, and the part of experts."""
        whole, experts = self.replicated_parameters(stage), self.plan.parallel.expert
        dense = (stage.parameters - stage.experts - whole) / self.plan.divisor("matrices") + whole
        return dense, stage.experts / (experts if experts > 1 else self.plan.divisor("matrices"))

    def replicated_parameters(self, stage: StageParameters) -> int:
        """Returns the parameters, experts excepted, that each tensor parallel rank holds whole."""
        facts = self.facts
        table, head = stage.embedding and not self.splits_vocabulary, stage.head and not self.splits_head
        if facts.tied_embeddings:
            return head_parameters(facts) * (table or head)
        return table_parameters(facts) * table + head_parameters(facts) * head

    @property
    def splits_vocabulary(self) -> bool:
        """Whether tensor parallel ranks split the embedding: if the vocabulary is divisible."""
        ranks = self.plan.parallel.tensor
        return ranks > 1 and self.facts.vocab_size % ranks == 0

    @property
    def splits_head(self) -> bool:
        """Whether they split the head, too: not one of a few outputs."""
        return self.splits_vocabulary and self.facts.num_labels is None


class Worker(DeviceShare):
    """A device of a plan, and the time that it needs for its share."""

    def __init__(self, plan: Plan, rates: AchievedRates, assumed: Assumptions, micro_batch: int | None = None) -> None:
        super().__init__(plan, micro_batch)
        self.assumed = assumed
        self.length = plan.recipe.data.sequence_length
        self.product_rate, self.bandwidth = rates.matmul, rates.memory
        self.recomputes_logits = chunks_loss(plan) and recomputes_loss(plan.recipe) and not is_one_chunk(plan)
        self.attention_share, self.attention_rate = _attention(plan, assumed, rates)
        self.floor = 0.0 if plan.cluster.spec.on_cpu else assumed.layer_kernels * rates.launch_s
        """Seconds of a layer's forward pass below which the launches of its kernels decide."""

    def micro_batch(self, stage: StageParameters) -> Work:
        """Returns the time of one forward and one backward pass."""
        facts, slices = self.facts, self.plan.divisor("matrices")
        products = 2 * stage.active / slices * self.tokens / self.product_rate
        scores = 4 * stage.layers * facts.heads * facts.head_dim / slices * self.length * self.attention_share
        attention = scores * self.tokens / self.attention_rate
        residual = self.assumed.residual_passes / self.plan.megatron_sp_ranks + self.assumed.end_passes
        passes = residual * stage.layers * facts.hidden_size
        passes += self.assumed.width_passes * stage.active / facts.hidden_size / slices
        memory = passes * self.tokens * self.compute_bytes / self.bandwidth
        again = self.recomputed_layers(stage) / stage.layers
        weights = self.device_parameters(stage) * self.weight_bytes / self.bandwidth
        floor = stage.layers * self.floor
        layers = max(products + attention + memory + weights, floor)
        head_product, head_memory = self._head() if stage.head else (0.0, 0.0)
        # A gradient is written in the type of the weights, then added to the accumulated one.
        accumulation = stage.trained * self.device_parameters(stage) * (2 * self.weight_bytes + 2 * self.gradient_bytes)
        # One product for the gradient of the input, and one for that of a trained weight.
        backward = products * (stage.reached + stage.trained)
        backward += stage.reached * (BACKWARD * (memory + weights) + ATTENTION_BACKWARD * attention)
        # KTO's divergence takes a pass without gradient over as many other completions.
        passes = 2 if self.plan.recipe.objective.name == "kto" else 1
        return Work(
            forward=passes * (layers + head_product + head_memory / 2),
            recompute=stage.reached * again * (memory if self.again == "selective" else layers)
            + stage.reached * self._tiled(stage) * products
            + (head_product if self.recomputes_logits else 0.0),
            backward=max(backward, stage.reached * floor)
            + (BACKWARD if facts.trains_head else 1.0) * head_product
            + head_memory / 2
            + accumulation / self.bandwidth,
        )

    def _tiled(self, stage: StageParameters) -> float:
        """Returns the share of the layers' products that feed-forward layers in tiles compute once more."""
        facts = self.facts
        if not feeds_in_tiles(self.plan):
            return 0.0
        attention = 2 * facts.hidden_size * facts.head_dim * (facts.heads + facts.kv_heads)
        return max(0.0, 1 - stage.layers * attention / stage.active)

    def _head(self) -> tuple[float, float]:
        """Returns the time of the product in the forward pass, and of the passes over the logits in both directions."""
        facts = self.facts
        # Logits are gathered, so each tensor parallel rank computes the whole loss.
        split = self.plan.divisor("matrices") if self.splits_head else 1
        product = 2 * head_parameters(facts) / split * self.tokens / self.product_rate
        return product, facts.outputs * self.tokens * self.assumed.logit_bytes / self.bandwidth

    def update_bytes(self, stage: StageParameters) -> float:
        """Returns the bytes read and written per parameter in an update of fp32 states; lower weights are copies."""
        copy = self.weight_bytes if self.weight_bytes < 4 else 0
        optim, row, share = self.plan.recipe.optim, self.plan.optimizer_row, self.layer_matrix_fraction(stage)
        if row.factors:
            # Weight and gradient are read for sums first, and the update takes the gradient's place in between.
            return 4 + 4 + 4 + 4 + 4 + 8 + copy
        if row.codes:
            return UPDATE_BYTES + copy
        outside, inside = (states_kept(row, optim, in_layers=inside, is_matrix=True) for inside in (False, True))
        states = outside * (1 - share) + inside * share
        # Each temporary tensor of a class of the user's, which is not one fused kernel, is written and read.
        temporaries = 8 * OWN_TEMPORARIES if self.plan.optimizer else 0
        return 4 + 8 + 8 * states + temporaries + copy  # gradient read; master weight and moments read and written

    def orthogonal(self, stage: StageParameters) -> float:
        """Returns the time in which the ranks of a stage, together, make the momentum of all matrices orthogonal.

        Each step takes three products for a matrix of m × n, m ≤ n: two of 2·m²·n FLOPs, and one of 2·m³. The hidden
        size stands for m.
        """
        share = self.layer_matrix_fraction(stage)
        if not share:
            return 0.0
        steps = MuonOptions.model_validate(self.plan.recipe.optim.options).ns_steps
        elements = stage.trained * stage.parameters * share
        ranks = self.plan.gradient_ranks * self.plan.divisor("matrices")
        return 6 * steps * self.facts.hidden_size * elements / ranks / self.product_rate


def _attention(plan: Plan, assumed: Assumptions, rates: AchievedRates) -> tuple[float, float]:
    """Returns the computed share of the T × T scores, and the FLOP/s that are reached.

    A causal kernel skips half. A mask of documents, which `sdpa` needs, prevents it from skipping.
    """
    kind, masks = plan.recipe.model.attention_kernel, plan.recipe.data.has_document_mask
    if kind == "eager":
        return 1.0, assumed.attention_eager * rates.peak
    return (1.0 if kind == "sdpa" and masks else 0.5), rates.attention
