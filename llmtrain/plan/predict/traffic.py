"""The communication between the ranks of a plan, per micro-batch and per step.

The model follows the engines under the configurations that this package writes, with DeepSpeed 0.19.8. ZeRO-1 reduces
gradients once a step, and ZeRO-2 after each micro-batch, both by all-reduces (`use_multi_rank_bucket_allreduce`).
A test counts the bytes on the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from llmtrain.plan.axes import used
from llmtrain.plan.facts.weights import Weight
from llmtrain.plan.flops import head_parameters, table_parameters
from llmtrain.plan.kernels import feeds_in_tiles
from llmtrain.plan.plan import Plan
from llmtrain.plan.predict import flat
from llmtrain.plan.predict.flat import SPLIT_COLUMNS, bucket_elements, overlaps_reduction
from llmtrain.plan.predict.links import Groups, RankGroup, Store, TransferKind, bytes_sent
from llmtrain.plan.predict.work import DeviceShare, StageParameters, parameters_of_ranks

REUSE_DISTANCE = 1_000_000_000
"""Largest number of elements used between two uses of a parameter for which ZeRO-3 keeps it gathered."""
SUMS = 4
"""Tensors of a layer that tensor parallel ranks sum: the outputs of attention and feed-forward in the forward pass,
and the gradients of their inputs in the backward pass."""
SUMS_BESIDE_EXPERTS = 2
"""The same if the experts of a layer are distributed: of attention only."""


@dataclass(frozen=True)
class Transfer:
    """Tensors that a rank sends one after the other."""

    kind: TransferKind
    tensors: tuple[tuple[float, RankGroup | Store], ...]
    """Bytes of each tensor, and the ranks that take part or the place on the host that it is sent to."""
    times: float = 1.0


class Traffic(NamedTuple):
    """The transfers of each rank of a stage."""

    exposed: list[Transfer]
    """For each micro-batch; not overlapped with computation."""
    overlapped: list[Transfer]
    """For each micro-batch; overlapped with the computation while that lasts."""
    forward_overlapped: list[Transfer]
    """For each micro-batch; overlapped with its forward pass while that lasts."""
    backward_overlapped: list[Transfer]
    """For each micro-batch; overlapped with its backward pass while that lasts."""
    step: list[Transfer]
    """Once per step; not overlapped with computation."""
    step_forward_overlapped: list[Transfer]
    """Once per step; overlapped with the first forward pass while that lasts."""
    step_overlapped: list[Transfer]
    """Once per step; overlapped with the last backward pass while that lasts."""
    between_stages: list[Transfer]
    """For each micro-batch; the schedule decides for how many of them a rank waits."""

    def per_step(self, micro_batches: int) -> Iterator[Transfer]:
        """Yields all transfers, with how often they take place in a step."""
        once = self.step, self.step_forward_overlapped, self.step_overlapped
        for transfers in self:
            times = 1 if any(transfers is group for group in once) else micro_batches
            yield from (replace(transfer, times=transfer.times * times) for transfer in transfers)


def by_kind(
    transfers: Iterable[Transfer], amount: Callable[[TransferKind, float, RankGroup | Store], float]
) -> dict[str, float]:
    """Returns the amount for each kind of transfer: bytes by `bytes_sent`, seconds by `Links.seconds`."""
    amounts: list[dict[str, float]] = [
        {transfer.kind: transfer.times * sum(amount(transfer.kind, size, where) for size, where in transfer.tensors)}
        for transfer in transfers
    ]
    return summed(*amounts)


def summed(*parts: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums of all parts for each kind; kinds with a sum of 0 are left out."""
    total = defaultdict[str, float](float)
    for part in parts:
        for kind, amount in part.items():
            total[kind] += amount
    return {kind: amount for kind, amount in sorted(total.items()) if amount}


def volumes(plan: Plan) -> tuple[dict[str, int], ...]:
    """Returns, for each rank of a pipe, the bytes that it sends in a step, by kind (`TransferKind`).

    Empty for `nn.DataParallel`, which copies within one process.
    """
    if plan.recipe.parallel.strategy == "data_parallel":
        return ()
    groups, micro_batches = CommunicationGroups(plan), plan.batch.gradient_accumulation_steps
    steps = (by_kind(groups.traffic(stage).per_step(micro_batches), bytes_sent) for stage in parameters_of_ranks(plan))
    return tuple({kind: round(size) for kind, size in step.items()} for step in steps)


class CommunicationGroups:
    """The groups of a plan's ranks, and the transfers within each of them."""

    def __init__(self, plan: Plan, micro_batch: int | None = None) -> None:
        """micro_batch: its number of sequences; by default the plan's."""
        self.plan, self.share, self.groups = plan, DeviceShare(plan, micro_batch), Groups.of(plan)
        self.hidden_states = self.share.tokens * plan.model.hidden_size * self.share.compute_bytes
        """Bytes of a residual stream that enters attention or feed-forward for a micro-batch, on one device."""
        self.residual = self.hidden_states / plan.megatron_sp_ranks
        """Bytes that are passed between two layers for a micro-batch, on one device."""

    def traffic(self, stage: StageParameters) -> Traffic:
        """Returns all transfers of the ranks of a stage."""
        found = Traffic(self.within_layers(stage), *([] for _ in Traffic._fields[1:]))
        if self.plan.parallel.offload_activations:
            inputs = 2 * self.share.recomputed_layers(stage) * stage.reached
            found.overlapped.append(Transfer("host", ((self.residual, "cpu"),), inputs))
        # Activations and their gradients: with one neighbour at the ends of the pipeline, and with two in between.
        messages = (2 if self.plan.parallel.stages == 2 else 4) * self.plan.parallel.pipeline_chunks
        found.between_stages.append(Transfer("p2p", ((self.residual, self.groups.pipeline),), messages))
        facts, strategy = self.plan.model, self.plan.recipe.parallel.strategy
        if self.plan.stages and facts.tied_embeddings and facts.trains_embedding:
            # The first and the last stage sum the gradients of a tied embedding.
            size = head_parameters(facts) / self.plan.divisor("matrices") * self.share.gradient_bytes
            pipe = self.groups.pipeline
            ends = RankGroup(2, pipe.stride * (pipe.size - 1))
            found.step.append(Transfer("all_reduce", ((size, ends),)))
        if strategy == "deepspeed":
            self._zero(stage, found)
        elif strategy == "fsdp2":
            self._gathered(stage, found, gathers=2 if self.plan.parallel.zero_stage == 3 else 1)
            # Gradients of the micro-batches before the last one stay where they are (`no_sync`).
            _split_transfer(
                self._gradients("reduce_scatter", stage), self._last(stage), found.step, found.step_overlapped
            )
        else:
            _split_transfer(self._gradients("all_reduce", stage), self._last(stage), found.step, found.step_overlapped)
        self._ring(stage, found)
        found.step.extend([*self._matrices(stage), *self._factors(stage), *self._blocks(stage)])
        return found

    def within_layers(self, stage: StageParameters) -> list[Transfer]:
        """Returns the transfers within layers for each micro-batch, which no computation hides."""
        axes = [axis.name for axis in used(self.plan.parallel) if axis.name in WITHIN_LAYERS]
        return [transfer for axis in axes for transfer in WITHIN_LAYERS[axis](self, stage)]

    def _matrices(self, stage: StageParameters) -> Iterator[Transfer]:
        """Yields the exchanges of parts of matrices, for an optimizer that updates whole matrices."""
        fraction = stage.trained * self.share.layer_matrix_fraction(stage)
        if not fraction:
            return
        size = fraction * self.share.compute_bytes
        shards = self._among_replicas(stage, size / self.groups.replicas.size)
        yield Transfer("all_to_all", shards)
        if self.plan.parallel.zero_stage == 0:
            yield Transfer("all_gather", self._among_replicas(stage, size))
        else:
            yield Transfer("all_to_all", shards)

    def _factors(self, stage: StageParameters) -> Iterator[Transfer]:
        """Yields the all-reduces for an optimizer that keeps sums along rows and columns.

        The sums of squares of each weight and of its update are exchanged as well. Replicas whose flat partitions
        consist of whole weights exchange nothing.
        """
        weights, tensor = self.plan.model.weights, self.groups.tensor.size
        if weights is None or not self.plan.optimizer_row.factors:
            return
        for group in flat.optimizer_groups(self.plan, weights, parameters_of_ranks(self.plan).index(stage)):
            alone = group.ranks if self._division == "flat" and not group.is_cut else 1
            sums = (sum(group.factors) + 2 * len(group.factors)) / alone
            parts = tensor if group.expert_ranks == 1 else group.expert_ranks
            yield Transfer("all_reduce", ((4 * sums, RankGroup(group.ranks // alone * parts, 1)),))

    def _blocks(self, stage: StageParameters) -> Iterator[Transfer]:
        """Yields the all-reduces of the largest magnitudes of blocks that ranks share, for 8-bit moments.

        FSDP2 needs none, because it divides weights between rows.
        """
        weights, parallel = self.plan.model.weights, self.plan.parallel
        if weights is None or parallel.strategy != "deepspeed" or not self.plan.optimizer_row.codes:
            return
        for group in flat.optimizer_groups(self.plan, weights, parameters_of_ranks(self.plan).index(stage)):
            sliced, divided = group.cut_blocks(self._division)
            tensor = self.groups.tensor.size
            ranks = RankGroup(group.ranks * tensor, 1) if sliced else RankGroup(group.ranks, tensor)
            if sliced or divided:
                yield Transfer("all_reduce", ((4 * group.codes * (sliced + divided), ranks),))

    @property
    def _division(self) -> flat.Division:
        """How replicas divide the optimizer's states of the weights that each of them holds."""
        zero_stage = self.plan.parallel.zero_stage
        is_flat = zero_stage < 3 and self.plan.parallel.strategy == "deepspeed"
        return "none" if zero_stage == 0 else "flat" if is_flat else "each"

    def tensor(self, stage: StageParameters) -> Iterator[Transfer]:
        """Yields the transfers of tensor groups. Activation checkpointing repeats the sum of attention."""
        each = SUMS_BESIDE_EXPERTS if self.plan.parallel.expert > 1 else SUMS
        # A recomputation leaves out the last product of a layer, because nothing needs its result. Tiles always
        # recompute their products.
        again, tiled = self.share.recomputed_layers(stage), feeds_in_tiles(self.plan)
        sums = stage.layers * each + again + tiled * (stage.layers + again)
        tables = stage.embedding + stage.head
        split = stage.embedding * self.share.splits_vocabulary + stage.head * self.share.splits_head
        if self.share.splits_head and stage.head:
            logits = self.share.tokens * self.plan.model.outputs * self.share.compute_bytes
            yield Transfer("all_gather", ((logits, self.groups.tensor),))
        sums += split
        whole = ((self.hidden_states, self.groups.tensor),)
        if self.plan.megatron_sp_ranks == 1:
            yield Transfer("all_reduce", whole, sums)
        else:
            # A sum becomes a reduction, each rank for its own slice, and a gathering. A recomputed layer gathers twice.
            yield Transfer("reduce_scatter", whole, sums)
            yield Transfer("all_gather", whole, sums + again + tables - split)
        of_layer, last = self._summed_gradients()
        yield Transfer("all_reduce", of_layer, stage.layers)
        yield Transfer("all_reduce", last, stage.head)

    def _summed_gradients(self) -> tuple[tuple[tuple[float, RankGroup], ...], ...]:
        """Returns the gradients of whole parameters that are summed: those of a layer, and those after the last layer.

        Each rank computes a part of them, for its own heads, tokens or parts of experts: those of norms, of biases that
        are added to sums, and of routers.
        """
        weights, facts = self.plan.model.weights, self.plan.model
        if weights is None:
            return (), ()
        layer, last = weights.layer(facts.layers - 1), list[Weight]()
        own = [
            weight for weight in layer if weight.module in ("q_norm", "k_norm") and weight.shape == (facts.head_dim,)
        ]
        if self.plan.megatron_sp_ranks > 1:
            moe_blocks = tuple({weight.name.partition("experts.")[0] for weight in layer if weight.is_expert})
            own += [weight for weight in layer if not weight.is_matrix and _is_sequence_sharded(weight)]
            own += [weight for weight in layer if weight.name.startswith(moe_blocks) and not weight.is_expert]
            last = [weight for weight in weights.outside if weight.shape == (facts.hidden_size,)]
        return tuple(
            tuple((weight.elements * self.share.weight_bytes, self.groups.tensor) for weight in part if weight.trained)
            for part in (own, last)
        )

    def sequence(self, stage: StageParameters) -> Iterator[Transfer]:
        """Yields the exchanges of heads for parts of the sequence, and back."""
        queries, keys = self._exchanged_elements()
        group, width = self.groups.heads, self.share.compute_bytes
        yield Transfer("all_to_all", ((queries * width, group), (keys * width, group)), 2 * self._passes(stage))

    def _exchanged_elements(self) -> tuple[float, float]:
        """Returns the elements of a device's queries and of its keys, which are as many as its values.

        Key and value heads are repeated until they are divisible, at most to the number of query heads.
        """
        facts, group = self.plan.model, self.groups.heads
        keys = max(facts.kv_heads, min(group.size * self.groups.tensor.size, facts.heads))
        width = facts.head_dim / self.plan.divisor("matrices") * self.share.tokens
        return facts.heads * width, keys * width

    def _ring(self, stage: StageParameters, found: Traffic) -> None:
        """Adds the hops of keys and values around a ring, which arrive while attention computes with those before.

        Their gradients, in fp32, follow them in the backward pass, and make a last hop home, which nothing hides.
        """
        group, keys = self.groups.ring, self._exchanged_elements()[1]
        if group.size == 1:
            return
        hop = Transfer("p2p", ((keys * self.share.compute_bytes, group),) * 2, (group.size - 1) * stage.layers)
        again = self.share.recomputed_layers(stage) / stage.layers if self.share.again == "full" else 0.0
        of_gradients = Transfer("p2p", ((4 * keys, group),) * 2, stage.layers)
        found.forward_overlapped.append(hop)
        found.backward_overlapped.append(replace(hop, times=hop.times * (1 + again)))
        found.backward_overlapped.append(replace(of_gradients, times=hop.times))
        found.exposed.append(of_gradients)

    def expert(self, stage: StageParameters) -> Iterator[Transfer]:
        """Yields the transfers of tokens to their experts and back.

        Each rank of a tensor group sends a part of the group's tokens, and gathers the results.
        """
        dispatched, tensor = self.hidden_states * max(self.plan.model.experts_per_token, 1), self.groups.tensor
        # `selective` keeps the tokens that arrive.
        passes = 2 * stage.layers if self.share.again == "selective" else self._passes(stage)
        yield Transfer("all_to_all", ((dispatched / tensor.size, self.groups.expert),), 2 * passes)
        yield Transfer("all_gather", ((self.hidden_states, tensor),), 2 * stage.layers)

    def _passes(self, stage: StageParameters) -> int:
        return 2 * stage.layers + self.share.recomputed_layers(stage)

    def _zero(self, stage: StageParameters, found: Traffic) -> None:
        """Adds the transfers of DeepSpeed's ZeRO stages and of offloading."""
        zero_stage, parallel, share = self.plan.parallel.zero_stage, self.plan.parallel, self.share
        if zero_stage == 3:
            # The last layers' parameters are used again soon enough to stay gathered for the backward pass.
            own = share.device_parameters(stage)
            again = max(0.0, own - REUSE_DISTANCE / 2) / own
            self._gathered(stage, found, gathers=1 + again)
            reduction = self._gradients("reduce_scatter", stage)
            _split_transfer(reduction, self._last(stage), found.exposed, found.backward_overlapped)
        else:
            last = self._last(stage) if overlaps_reduction(self.plan) else 1.0
            each_pass, once = (found.exposed, found.backward_overlapped), (found.step, found.step_overlapped)
            _split_transfer(self._gradients("all_reduce", stage), last, *(each_pass if zero_stage == 2 else once))
            if zero_stage:
                found.step.append(self._weights(stage, part=stage.trained))
        shard = stage.trained * share.device_parameters(stage) / self.groups.replicas.size
        if parallel.offload_optimizer != "none":
            # Gradients are sent to the host as soon as they are reduced; updated weights come back.
            gradients, weights = shard * share.gradient_bytes, shard * share.weight_bytes
            (found.exposed if zero_stage >= 2 else found.step).append(Transfer("host", ((gradients, "cpu"),)))
            found.step.append(Transfer("host", ((weights, "cpu"),)))
        if parallel.offload_param != "none":
            weights = share.device_parameters(stage) / self.groups.replicas.size * share.weight_bytes
            found.overlapped.append(Transfer("host", ((2 * weights, parallel.offload_param),)))

    def _gathered(self, stage: StageParameters, found: Traffic, gathers: float) -> None:
        """Adds the all-gathers of weights for a micro-batch: in its forward pass, and again in its backward pass."""
        near, each, times = self.plan.parallel.hierarchical_partition, self._weights(stage), 1.0
        first = self._at_an_end(stage)
        if near > 1:
            # Neighbours keep frozen parameters from the start, and others from their first use in a step on.
            _split_transfer(replace(each, times=stage.trained), first, found.step, found.step_forward_overlapped)
            weights = self.share.device_parameters(stage) * self.share.weight_bytes
            each = Transfer("all_gather", ((weights, RankGroup(near, 1)),))
            times -= stage.trained / self.plan.batch.gradient_accumulation_steps
        _split_transfer(replace(each, times=times), first, found.exposed, found.forward_overlapped)
        found.backward_overlapped.append(replace(each, times=gathers - 1))

    def _last(self, stage: StageParameters) -> float:
        """Returns the share of a reduction that starts when the backward pass has ended."""
        return self._at_an_end(stage, stage.trained)

    def _at_an_end(self, stage: StageParameters, trained: float = 1.0) -> float:
        """Returns the share of the weights, or of the trained ones, whose messages no computation hides.

        The embedding and one more message are needed before anything can be computed, and their gradients come last.
        """
        slices = self.plan.divisor("matrices") if self.share.splits_vocabulary else 1
        table = stage.embedding * table_parameters(self.plan.model) / slices
        return min(1.0, (table + self._message() / trained) / self.share.device_parameters(stage))

    def _message(self) -> float:
        """Returns the elements that the engine gathers or reduces at once."""
        strategy, facts = self.plan.recipe.parallel.strategy, self.plan.model
        if strategy == "deepspeed":
            return bucket_elements(self.plan)
        if strategy == "fsdp2":
            return sum(facts.layer_parameters) / facts.layers
        # Horovod sends all available gradients every millisecond.
        return flat.DDP_BUCKET_MIB * 2**20 / self.share.gradient_bytes if strategy == "ddp" else 0.0

    def _weights(self, stage: StageParameters, part: float = 1.0) -> Transfer:
        """Returns the all-gathers of a device's weights, or of a part of them."""
        return Transfer("all_gather", self._among_replicas(stage, part * self.share.weight_bytes))

    def _gradients(self, kind: TransferKind, stage: StageParameters) -> Transfer:
        """Returns a reduction of a device's gradients, in the dtype in which they are accumulated."""
        return Transfer(kind, self._among_replicas(stage, stage.trained * self.share.gradient_bytes))

    def _among_replicas(self, stage: StageParameters, size: float) -> tuple[tuple[float, RankGroup], ...]:
        dense, experts = self.share.dense_and_expert_parameters(stage)
        return (
            (dense * size, self.groups.replicas),
            *([(experts * size, self.groups.expert_replicas)] if experts else []),
        )


def _split_transfer(transfer: Transfer, share: float, exposed: list[Transfer], overlapped: list[Transfer]) -> None:
    """Adds a share of a transfer to `exposed`, and the rest to `overlapped`."""
    exposed.append(replace(transfer, times=transfer.times * share))
    overlapped.append(replace(transfer, times=transfer.times * (1 - share)))


def _is_sequence_sharded(weight: Weight) -> bool:
    """Whether a vector belongs to a norm between attention and feed-forward, or is added to their output."""
    is_beside = weight.name.count(".") == 1
    return is_beside or (weight.module in SPLIT_COLUMNS and weight.name.endswith(".bias"))


WITHIN_LAYERS: dict[str, Callable[[CommunicationGroups, StageParameters], Iterator[Transfer]]] = {
    "tensor": CommunicationGroups.tensor,
    "sequence": CommunicationGroups.sequence,
    "expert": CommunicationGroups.expert,
}
"""Name of an axis that communicates in every layer, and its transfers on the ranks of a stage."""
