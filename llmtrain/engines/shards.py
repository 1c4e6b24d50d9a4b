"""How a weight lies on the ranks of a tensor parallel group, and how it becomes whole again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.engines.pieces import Region


@dataclass(frozen=True)
class Split:
    """A weight cut along one dimension."""

    dim: int
    """The dimension, of `logical`."""
    logical: tuple[int, ...]
    """Shape of the whole weight as it was viewed for the cut."""
    shape: tuple[int, ...]
    """Shape of the whole weight as its module holds it."""
    widths: tuple[tuple[int, ...], ...]
    """Of each fused part of the weight (one where nothing is fused), the width that each rank holds."""

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of a rank, as it was viewed for the cut."""
        own = sum(part[rank] for part in self.widths)
        return (*self.logical[: self.dim], own, *self.logical[self.dim + 1 :])

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole weight, from the shards of all ranks in their order."""
        pieces = [
            torch.split(shard.reshape(self.shard_shape(rank)), [part[rank] for part in self.widths], dim=self.dim)
            for rank, shard in enumerate(shards)
        ]
        ordered = [piece for part in zip(*pieces, strict=True) for piece in part]
        return torch.cat(ordered, dim=self.dim).reshape(self.shape)

    def region(self, rank: int) -> Region:
        """What a rank holds."""
        ranges, first = [], 0
        for part in self.widths:
            ranges.append((first + sum(part[:rank]), part[rank]))
            first += sum(part)
        return Region.ranges(self.logical, self.dim, ranges)


def split_of(parameter: Tensor) -> Split | None:
    """How DeepSpeed's layers have cut a parameter; None where every rank holds the whole of it, and for buffers.

    Raises ValueError for a cut that DeepSpeed does not describe.
    """
    meta = getattr(parameter, DS_AUTOTP_UC_META, None)
    if meta is None or meta["replicated"]:
        return None
    sizes = meta["partition_sizes"]
    widths = meta["sub_param_shard_widths"] or (sizes and (sizes,))
    if meta["conversion"]["unsupported_reason"] or meta["partition_dim"] is None or not widths:
        raise ValueError(f"a weight of shape {meta['original_shape']} is cut in a way that nothing describes")
    return Split(
        dim=meta["partition_dim"],
        logical=meta["logical_shape"],
        shape=meta["original_shape"],
        widths=tuple(tuple(part) for part in widths),
    )


def gather_whole(shard: Tensor, split: Split | None, group: dist.ProcessGroup) -> Tensor:
    """The whole of a tensor that is cut as `split` says; called by all ranks of the tensor parallel group."""
    if split is None:
        return shard
    shapes = [split.shard_shape(rank) for rank in range(dist.get_world_size(group))]
    lengths = [torch.Size(shape).numel() for shape in shapes]
    # Shards may differ in size, and a collective takes equal ones.
    padded = nn.functional.pad(shard.reshape(-1), (0, max(lengths) - shard.numel()))
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    return split.join([flat[:length] for flat, length in zip(received, lengths, strict=True)])
