"""Reduces sums over whole weights, or largest values, wherever ranks hold only shards.

Every rank sums over its shards, and the ranks that hold shards of the same weights add these sums up; or they take the
maximum of their largest values, and of 0. Ranks whose trained tensors share a weight, directly or through others, form
a group, because ZeRO's flat tensors begin and end within weights, and a group for each weight would mean thousands. A
group sends all sums of an update in one message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor
from torch import distributed as dist

from llmtrain.engines.runtime.agree import gather


class SharedSums:
    """The weights of which this rank holds shards, and the ranks that hold the others."""

    def __init__(
        self, counts: list[dict[str, int]], device: torch.device, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """counts: for each tensor trained here, the number of sums of each weight in it. device: of their exchange.

        operation: sum or maximum. Called by all ranks.
        """
        self._device, self._operation = device, operation
        by_rank = gather(counts)
        this_rank = dist.get_rank() if len(by_rank) > 1 else 0
        self._counts = {name: count for tensors in by_rank for tensor in tensors for name, count in tensor.items()}
        self._connected = _connected([[*tensor] for tensors in by_rank for tensor in tensors])
        ranks_of: defaultdict[str, set[int]] = defaultdict(set)
        for rank, tensors in enumerate(by_rank):
            for tensor in tensors:
                for name in tensor:
                    ranks_of[self._connected[name][0]].add(rank)
        self._ranks = {name: tuple(sorted(ranks_of[names[0]])) for name, names in self._connected.items()}
        # All ranks make all groups, in an order that they share.
        groups = {ranks: dist.new_group(ranks) for ranks in sorted({*self._ranks.values()}) if len(ranks) > 1}
        self._groups = {ranks: group for ranks, group in groups.items() if this_rank in ranks}

    def reduce(self, local_sums: Mapping[str, Tensor], count: int | None = None) -> dict[str, Tensor]:
        """Returns the sums (or maxima) over the shards of all ranks, by weight.

        local_sums: over the shards of this rank, for all weights in some of its trained tensors. count: number of sums
        of each weight, by default as given to the constructor. All ranks that hold shards of these weights call it.
        """
        names_of_group: defaultdict[tuple[int, ...], dict[str, None]] = defaultdict(dict)
        for name in sorted(local_sums):
            names_of_group[self._ranks[name]] |= dict.fromkeys(self._connected[name])
        reduced: dict[str, Tensor] = {}
        for ranks, unordered in sorted(names_of_group.items()):
            names = sorted(unordered)
            lengths = [count or self._counts[name] for name in names]
            like = next(iter(local_sums.values()))
            parts = [local_sums.get(name, like.new_zeros(length)) for name, length in zip(names, lengths, strict=True)]
            message = torch.cat(parts).to(self._device)
            if ranks in self._groups:
                dist.all_reduce(message, self._operation, group=self._groups[ranks])
            sums = dict(zip(names, torch.split(message.to(like.device), lengths), strict=True))
            reduced |= {name: sums[name] for name in names if name in local_sums}
        return reduced


def _connected(lists: list[list[str]]) -> dict[str, list[str]]:
    """Returns, for each name, those that are in a list with it, directly or through others."""
    connected: dict[str, list[str]] = {}
    for names in lists:
        components = {id(component): component for name in names if (component := connected.get(name)) is not None}
        joined = [*dict.fromkeys([*(name for component in components.values() for name in component), *names])]
        if len(components) == 1 and len(joined) == len(next(iter(components.values()))):
            continue  # nothing new, as on most ranks
        connected |= dict.fromkeys(joined, joined)
    return connected
