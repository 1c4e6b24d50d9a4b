"""How AutoTP divides a weight among the ranks of a tensor parallel group, and how it is gathered again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.engines.state.shards import WeightSlice


@dataclass(frozen=True)
class AutoTPSplit:
    """A weight divided along one dimension."""

    dim: int
    """The dimension, of `logical`."""
    logical: tuple[int, ...]
    """Shape of the whole weight, as it was viewed for the split."""
    shape: tuple[int, ...]
    """Shape of the whole weight, as its module holds it."""
    widths: tuple[tuple[int, ...], ...]
    """The width on each rank, for each fused part of the weight (a single part if nothing is fused)."""

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's shard, as it was viewed for the split."""
        width = sum(part[rank] for part in self.widths)
        return (*self.logical[: self.dim], width, *self.logical[self.dim + 1 :])

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Returns the whole weight, joined from the shards of all ranks in order."""
        parts_of_ranks = [
            torch.split(shard.reshape(self.shard_shape(rank)), [part[rank] for part in self.widths], dim=self.dim)
            for rank, shard in enumerate(shards)
        ]
        ordered = [shard for part in zip(*parts_of_ranks, strict=True) for shard in part]
        return torch.cat(ordered, dim=self.dim).reshape(self.shape)

    def slice_of_rank(self, rank: int) -> WeightSlice:
        """Returns the slice of the whole weight that a rank holds."""
        ranges, first = [], 0
        for part in self.widths:
            ranges.append((first + sum(part[:rank]), part[rank]))
            first += sum(part)
        return WeightSlice.ranges(self.logical, self.dim, ranges)


def split_of(parameter: Tensor) -> AutoTPSplit | None:
    """Returns how DeepSpeed's layers have split a parameter; None for buffers, and if every rank holds all of it.

    Raises ValueError for a split that DeepSpeed does not describe.
    """
    meta = getattr(parameter, DS_AUTOTP_UC_META, None)
    if meta is None or meta["replicated"]:
        return None
    sizes = meta["partition_sizes"]
    widths = meta["sub_param_shard_widths"] or (sizes and (sizes,))
    if meta["conversion"]["unsupported_reason"] or meta["partition_dim"] is None or not widths:
        raise ValueError(f"a weight of shape {meta['original_shape']} is partitioned in an unknown way")
    return AutoTPSplit(
        dim=meta["partition_dim"],
        logical=meta["logical_shape"],
        shape=meta["original_shape"],
        widths=tuple(tuple(part) for part in widths),
    )


def gather_whole(shard: Tensor, split: AutoTPSplit | None, group: dist.ProcessGroup) -> Tensor:
    """Returns the whole of a tensor that is split as `split` says; called by all ranks of the tensor parallel group."""
    if split is None:
        return shard
    shapes = [split.shard_shape(rank) for rank in range(dist.get_world_size(group))]
    lengths = [torch.Size(shape).numel() for shape in shapes]
    # Shards may differ in size, but the collective requires equal sizes.
    padded = nn.functional.pad(shard.reshape(-1), (0, max(lengths) - shard.numel()))
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    return split.join([flat[:length] for flat, length in zip(received, lengths, strict=True)])
