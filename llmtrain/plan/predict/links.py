"""Bytes that each kind of communication sends, and the time that they take on the links of a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from llmtrain.plan.axes import EXPERT, PIPELINE, SEQUENCE, TENSOR
from llmtrain.plan.plan import Plan
from llmtrain.plan.predict.assumptions import Assumptions

TransferKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "p2p", "host"]
Store = Literal["cpu", "nvme"]
"""The places where a host stores offloaded tensors."""


@dataclass(frozen=True)
class RankGroup:
    """A group of communicating ranks: `size` of them, each `stride` after the previous one."""

    size: int
    stride: int


@dataclass(frozen=True)
class Groups:
    """The groups of a plan's ranks."""

    tensor: RankGroup
    heads: RankGroup
    """Ranks that share sequences and divide the heads."""
    ring: RankGroup
    """Ranks that share sequences and pass keys and values on."""
    expert: RankGroup
    """Ranks that share the experts: adjacent ones, whichever replica and tensor group they belong to."""
    replicas: RankGroup
    """Ranks that hold the same weights, all those between tensor and pipeline groups."""
    expert_replicas: RankGroup
    """Ranks that hold the same experts."""
    pipeline: RankGroup

    @classmethod
    def of(cls, plan: Plan) -> Groups:
        """Returns the groups of a plan, whose ranks are numbered in the order of `INNERMOST_FIRST`."""
        tensor, pipeline = (RankGroup(plan.degree(axis), plan.stride(axis)) for axis in (TENSOR, PIPELINE))
        heads = RankGroup(plan.head_ranks, plan.stride(SEQUENCE))
        replicas = RankGroup(plan.gradient_ranks, tensor.size)
        experts, ranks = plan.degree(EXPERT), replicas.size * tensor.size
        return cls(
            tensor=tensor,
            heads=heads,
            ring=RankGroup(plan.sequence_ring, heads.stride * heads.size),
            expert=RankGroup(experts, 1),
            replicas=replicas,
            expert_replicas=RankGroup(max(ranks // experts, 1), experts) if experts > 1 else replicas,
            pipeline=pipeline,
        )


def bytes_sent(kind: TransferKind, size: float, where: RankGroup | Store) -> float:
    """Returns the bytes that each rank sends for a tensor of `size` bytes.

    Collectives are rings, as in NCCL and gloo: n ranks pass (n − 1) / n of the tensor to gather, scatter or exchange
    it. An all-reduce is a reduce-scatter and an all-gather.
    """
    if not isinstance(where, RankGroup):
        return size
    if where.size == 1:
        return 0.0
    if kind == "p2p":
        return size
    ring = size * (where.size - 1) / where.size
    return 2 * ring if kind == "all_reduce" else ring


@dataclass(frozen=True)
class Links:
    """Achieved bandwidths, in bytes per second and direction."""

    per_node: int
    """Devices of a node."""
    node: float
    network: float
    """Bandwidth of one device."""
    host: float
    """Bandwidth of one device to the memory of its host."""
    assumed: Assumptions

    def seconds(self, kind: TransferKind, size: float, where: RankGroup | Store) -> float:
        """Returns the seconds that it takes to send the bytes that `bytes_sent` counts."""
        if not isinstance(where, RankGroup):
            return size / (self.host if where == "cpu" else self.assumed.nvme_bandwidth)
        if where.size == 1:
            return 0.0
        members = self.members(where)
        on_one_node = members == where.size
        if kind == "p2p":  # over the slowest link
            latency = self.assumed.node_latency_s if on_one_node else self.assumed.network_latency_s
            return size / (self.node if on_one_node else self.network) + latency
        if kind == "all_to_all":  # each rank receives an equal part, over both links at once
            within = size * (members - 1) / where.size / self.node
            across = size * (where.size - members) / where.size / self.network
            return max(within, across) + self.latency(where)
        # Across nodes, each device of a node that belongs to the group has its own adapter, and the rings share them.
        bandwidth = self.node if on_one_node else self.network
        if not on_one_node and members > 1:
            bandwidth = min(members * self.network, self.node)
        return bytes_sent(kind, size, where) / bandwidth + (2 if kind == "all_reduce" else 1) * self.latency(where)

    def members(self, group: RankGroup) -> int:
        """Returns the number of a group's ranks that share a node."""
        return min(group.size, max(1, self.per_node // group.stride))

    def latency(self, group: RankGroup) -> float:
        """Returns the latency of a ring, in seconds."""
        nodes = group.size // self.members(group)
        return self.assumed.node_latency_s + self.assumed.network_latency_s * math.log2(max(nodes, 1))
