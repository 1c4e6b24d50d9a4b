"""How long collectives take on a cluster's links, by where the ranks of a group lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmtrain.plan.assumptions import Assumptions
from llmtrain.plan.plan import Layout


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `size` of them, each `stride` after the one before."""

    size: int
    stride: int


@dataclass(frozen=True)
class Groups:
    """The groups of a layout. Ranks are numbered with tensor innermost, then sequence, data, and pipeline outermost."""

    tensor: Group
    sequence: Group
    expert: Group
    replicas: Group
    """Ranks that hold the same weights: data and sequence parallel ones."""
    expert_replicas: Group
    """Ranks that hold the same experts."""
    pipeline: Group

    @classmethod
    def of(cls, layout: Layout) -> Groups:
        """As `StagePipeline` and DeepSpeed number them."""
        replicas = layout.dp * layout.sp
        return cls(
            tensor=Group(layout.tp, 1),
            sequence=Group(layout.sp, layout.tp),
            expert=Group(layout.ep, layout.tp),
            replicas=Group(replicas, layout.tp),
            expert_replicas=Group(max(replicas // layout.ep, 1), layout.tp * layout.ep),
            pipeline=Group(layout.pp, layout.tp * replicas),
        )


@dataclass(frozen=True)
class Links:
    """Seconds of collectives, bytes in. Bandwidths in bytes per second, each way, as they are reached."""

    per_node: int
    """Devices of a node."""
    node: float
    network: float
    """Of one device."""
    assumed: Assumptions

    def members(self, group: Group) -> int:
        """Ranks of a group that share a node."""
        return min(group.size, max(1, self.per_node // group.stride))

    def all_reduce(self, size: float, group: Group) -> float:
        """`size`: bytes of the tensor, which every rank holds. A reduce-scatter and an all-gather."""
        return 2 * self.gather(size, group)

    def gather(self, size: float, group: Group) -> float:
        """An all-gather of `size` bytes in all, or a reduce-scatter of as many.

        A ring passes (n − 1) / n of the bytes over each link. Across nodes, every device of a node
        that is in the group has an adapter of its own, and the rings share them.
        """
        if group.size == 1:
            return 0.0
        members = self.members(group)
        bandwidth = self.node
        if members < group.size:
            bandwidth = min(members * self.network, self.node) if members > 1 else self.network
        return size * (group.size - 1) / group.size / bandwidth + self.latency(group)

    def all_to_all(self, size: float, group: Group) -> float:
        """`size`: bytes that each rank holds; it sends an equal part to every other."""
        if group.size == 1:
            return 0.0
        members = self.members(group)
        within = size * (members - 1) / group.size / self.node
        across = size * (group.size - members) / group.size / self.network
        return max(within, across) + self.latency(group)

    def send(self, size: float, group: Group) -> float:
        """To the next rank of a group, over the slowest of its links."""
        if group.size == 1:
            return 0.0
        across = self.members(group) < group.size
        latency = self.assumed.network_latency_s if across else self.assumed.node_latency_s
        return size / (self.network if across else self.node) + latency

    def latency(self, group: Group) -> float:
        """Of one collective."""
        nodes = group.size // self.members(group)
        return self.assumed.node_latency_s + self.assumed.network_latency_s * math.log2(max(nodes, 1))
