"""What the ranks of a plan send each other, each micro-batch and each step.

By what the engines do under the configurations that this package writes, DeepSpeed 0.19.8: ZeRO-1 reduces
gradients once a step, ZeRO-2 after each micro-batch, both by all-reduces (`use_multi_rank_bucket_allreduce`)
that nothing overlaps; only ZeRO-3 overlaps. Pipelines send and wait. A test counts the bytes on the engine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from llmtrain.plan.flops import head_parameters
from llmtrain.plan.links import Group, Groups, Kind, Store, sent
from llmtrain.plan.plan import Plan
from llmtrain.plan.work import DeviceShare, Held, held_by

REUSE_DISTANCE = 1_000_000_000
"""Elements that may be used between two uses of a parameter for ZeRO-3 to keep it gathered meanwhile."""
ROW_PRODUCTS = 2
"""Products of a layer whose results tensor parallel ranks sum in the forward pass: the last ones of attention and
feed-forward."""
COLUMN_PRODUCTS = 5
"""Products of a layer for whose inputs the gradients are summed in the backward pass, one by one: query, key, value,
gate and up. A family that fuses some of them sends less."""


@dataclass(frozen=True)
class Transfer:
    """Tensors that a rank sends one after the other."""

    kind: Kind
    tensors: tuple[tuple[float, Group | Store], ...]
    """Bytes of each tensor, and the ranks that take part or the place on the host that it is sent to."""
    times: float = 1.0


class Traffic(NamedTuple):
    """The transfers of each rank of a stage."""

    waited: list[Transfer]
    """For each micro-batch, not overlapped with anything."""
    hidden: list[Transfer]
    """For each micro-batch, overlapped with the computation as far as that lasts."""
    step: list[Transfer]
    """Once per step, not overlapped with anything."""
    step_hidden: list[Transfer]
    """Once per step, overlapped with the last backward pass as far as that lasts."""


def by_kind(transfers: Iterable[Transfer], amount: Callable[[Kind, float, Group | Store], float]) -> dict[str, float]:
    """Returns the amount for each kind of transfer: bytes by `sent`, seconds by `Links.seconds`."""
    amounts: list[dict[str, float]] = [
        {one.kind: one.times * sum(amount(one.kind, size, where) for size, where in one.tensors)} for one in transfers
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
    """For each pipeline stage, bytes that one of its ranks sends in a step, by kind (`Kind`).

    Empty for `nn.DataParallel`, which copies through one process.
    """
    if plan.recipe.parallel.strategy == "data_parallel":
        return ()
    groups, each, found = CommunicationGroups(plan), plan.batch.gradient_accumulation_steps, []
    for held in held_by(plan.model, plan.stages):
        total = Counter[str]()
        for transfers, times in zip(groups.traffic(held), (each, each, 1, 1), strict=True):
            for kind, size in by_kind(transfers, sent).items():
                total[kind] += round(size * times)
        found.append({kind: size for kind, size in total.items() if size})
    return tuple(found)


class CommunicationGroups:
    """The groups of a plan's ranks, and the transfers within each of them."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.share, self.groups = plan, DeviceShare(plan), Groups.of(plan.layout)
        self.hidden_states = self.share.tokens * plan.model.hidden_size * self.share.compute_bytes
        """Bytes that a micro-batch passes between layers, on one device."""

    def traffic(self, held: Held) -> Traffic:
        """All that the ranks of a stage send."""
        found = Traffic(self._within_layers(held), [], [], [])
        # Activations and their gradients, with one neighbour at the ends of the pipeline, with two between.
        messages = 2 if self.plan.layout.pp == 2 else 4
        found.waited.append(Transfer("p2p", ((self.hidden_states, self.groups.pipeline),), messages))
        self._tied(found)
        strategy = self.plan.recipe.parallel.strategy
        if strategy == "deepspeed":
            self._zero(held, found)
        elif strategy == "fsdp2":
            self._fully_sharded(held, found, gathers=2 if self.plan.layout.zero_stage == 3 else 1)
        else:
            found.step_hidden.append(self._gradients("all_reduce", held))
        return found

    def _within_layers(self, held: Held) -> list[Transfer]:
        """Tensor, sequence and expert groups, which wait in every layer; once more where activations are recomputed."""
        layout, facts, share, groups = self.plan.layout, self.plan.model, self.share, self.groups
        passes = held.layers * (3 if share.checkpointing else 2)
        found = []
        if layout.tp > 1:
            sums = held.layers * (ROW_PRODUCTS * (2 if share.checkpointing else 1) + COLUMN_PRODUCTS)
            hidden_states = ((self.hidden_states, groups.tensor),)
            found.append(Transfer("all_reduce", hidden_states, sums))
            if held.head and not facts.tied_embeddings:
                logits = share.tokens * facts.vocab_size * share.compute_bytes
                found.append(Transfer("all_gather", ((logits, groups.tensor),)))
                found.append(Transfer("all_reduce", hidden_states))
        if layout.sp > 1:
            # Key and value heads are copied until they divide, at most to the number of query heads.
            keys = max(facts.kv_heads, min(layout.sp * layout.tp, facts.heads))
            width = facts.head_dim / layout.tp * share.tokens * share.compute_bytes
            tensors = ((facts.heads * width, groups.sequence), (keys * width, groups.sequence))
            found.append(Transfer("all_to_all", tensors, passes * 2))
        if layout.ep > 1:
            dispatched = self.hidden_states * max(facts.experts_per_token, 1)
            found.append(Transfer("all_to_all", ((dispatched, groups.expert),), 2 * passes))
        return found

    def _tied(self, found: Traffic) -> None:
        """The copies of a tied table on the first and the last stage add up their gradients."""
        if self.plan.layout.pp > 1 and self.plan.model.tied_embeddings:
            size = head_parameters(self.plan.model) / self.plan.layout.tp * self.share.gradient_bytes
            pipe = self.groups.pipeline
            ends = Group(2, pipe.stride * (pipe.size - 1))
            found.step.append(Transfer("all_reduce", ((size, ends),)))

    def _zero(self, held: Held, found: Traffic) -> None:
        """DeepSpeed's stages, with what is offloaded."""
        stage, parallel, share = self.plan.layout.zero_stage, self.plan.recipe.parallel, self.share
        if stage == 3:
            # What is used again soon enough, the last layers', is not gathered for the backward pass.
            own = share.own(held)
            again = max(0.0, own - REUSE_DISTANCE / 2) / own
            self._fully_sharded(held, found, gathers=1 + again)
        else:
            (found.waited if stage == 2 else found.step).append(self._gradients("all_reduce", held))
            if stage:
                found.step.append(self._weights(held))
        shard = share.own(held) / self.groups.replicas.size
        if parallel.offload_optimizer != "none":
            # Gradients go down as soon as they are reduced, updated weights come up.
            gradients, weights = shard * share.gradient_bytes, shard * share.weight_bytes
            (found.waited if stage >= 2 else found.step).append(Transfer("host", ((gradients, "cpu"),)))
            found.step.append(Transfer("host", ((weights, "cpu"),)))
        if parallel.offload_param != "none":
            found.hidden.append(Transfer("host", ((2 * shard * share.weight_bytes, parallel.offload_param),)))

    def _fully_sharded(self, held: Held, found: Traffic, gathers: float) -> None:
        """Weights gathered layer by layer, once or twice for a pass forward and one backward; gradients scattered."""
        found.hidden.append(self._weights(held, gathers))
        found.hidden.append(self._gradients("reduce_scatter", held))

    def _weights(self, held: Held, times: float = 1.0) -> Transfer:
        """All-gathers of a device's weights."""
        return Transfer("all_gather", self._among_replicas(held, self.share.weight_bytes), times)

    def _gradients(self, kind: Kind, held: Held) -> Transfer:
        """A reduction of a device's gradients, in the type that they are accumulated in."""
        return Transfer(kind, self._among_replicas(held, self.share.gradient_bytes))

    def _among_replicas(self, held: Held, size: int) -> tuple[tuple[float, Group], ...]:
        dense, experts = self.share.shares(held)
        return (
            (dense * size, self.groups.replicas),
            *([(experts * size, self.groups.expert_replicas)] if experts else []),
        )
