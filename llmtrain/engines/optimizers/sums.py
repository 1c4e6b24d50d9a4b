"""Sums over whole weights, or largest values, wherever ranks hold only parts of them.

Every rank sums over its parts, and the ranks that hold parts of the same weights add these sums up; or they take the
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
    """The weights of which this rank holds parts, and the ranks that hold the others."""

    def __init__(
        self, own: list[dict[str, int]], device: torch.device, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """own: for each tensor trained here, its weights with their numbers of sums. device: where these are exchanged.

        operation: sum or maximum. Called by all ranks.
        """
        self._device, self._operation = device, operation
        by_rank = gather(own)
        rank = dist.get_rank() if len(by_rank) > 1 else 0
        self._sizes = {name: size for tensors in by_rank for tensor in tensors for name, size in tensor.items()}
        self._beside = _joined([[*tensor] for tensors in by_rank for tensor in tensors])
        holders: defaultdict[str, set[int]] = defaultdict(set)
        for number, tensors in enumerate(by_rank):
            for tensor in tensors:
                for name in tensor:
                    holders[self._beside[name][0]].add(number)
        self._ranks = {name: tuple(sorted(holders[names[0]])) for name, names in self._beside.items()}
        # All ranks make all groups, in an order that they share.
        groups = {ranks: dist.new_group(ranks) for ranks in sorted({*self._ranks.values()}) if len(ranks) > 1}
        self._groups = {ranks: group for ranks, group in groups.items() if rank in ranks}

    def over_ranks(self, own: Mapping[str, Tensor], each: int | None = None) -> dict[str, Tensor]:
        """Returns the sums (or maxima) over the parts of all ranks, by weight.

        own: the sums over the parts of this rank, for all weights in some of its trained tensors. each: number of sums
        of each weight, by default as given to the constructor. All ranks that hold parts of these weights call it.
        """
        together: defaultdict[tuple[int, ...], dict[str, None]] = defaultdict(dict)
        for name in sorted(own):
            together[self._ranks[name]] |= dict.fromkeys(self._beside[name])
        found: dict[str, Tensor] = {}
        for ranks, names in sorted(together.items()):
            ordered = sorted(names)
            widths = [each or self._sizes[name] for name in ordered]
            like = next(iter(own.values()))
            parts = [own.get(name, like.new_zeros(width)) for name, width in zip(ordered, widths, strict=True)]
            total = torch.cat(parts).to(self._device)
            if ranks in self._groups:
                dist.all_reduce(total, self._operation, group=self._groups[ranks])
            sums = dict(zip(ordered, torch.split(total.to(like.device), widths), strict=True))
            found |= {name: sums[name] for name in ordered if name in own}
        return found


def _joined(lists: list[list[str]]) -> dict[str, list[str]]:
    """Returns, for each name, those that are in a list with it, directly or through others."""
    found: dict[str, list[str]] = {}
    for names in lists:
        parts = {id(part): part for name in names if (part := found.get(name)) is not None}
        joined = [*dict.fromkeys([*(one for part in parts.values() for one in part), *names])]
        if len(parts) == 1 and len(joined) == len(next(iter(parts.values()))):
            continue  # nothing new, as on most ranks
        found |= dict.fromkeys(joined, joined)
    return found
