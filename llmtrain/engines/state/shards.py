"""Checkpoint shards: what a rank holds of a weight, under the weight's Hugging Face name.

Every strategy divides weights in its own way, into slices of matrices, experts or stages, and ZeRO divides the result
again into flat ranges. A shard contains its place in the whole weight, so that a rank of any other strategy finds what
it needs among the shards of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A part of a whole weight: a range in each dimension."""

    offsets: Shape
    """Index of the first element in each dimension."""
    sizes: Shape


@dataclass(frozen=True)
class WeightSlice:
    """The part of a weight that an axis gives to a rank, before ZeRO divides it: chunks joined along one dimension."""

    shape: Shape
    """Shape of the whole weight, as it is viewed for the split."""
    chunks: tuple[Chunk, ...]
    dim: int = 0
    """Dimension along which the chunks are joined, if there are several."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> WeightSlice:
        """Returns the slice that is a whole weight."""
        return cls(tuple(shape), (Chunk((0,) * len(shape), tuple(shape)),))

    @classmethod
    def ranges(cls, shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> WeightSlice:
        """Returns the slice with some ranges, each (first index, length), of dimension `dim`, and all of the others."""
        shape = tuple(shape)

        def replaced(values: Shape, value: int) -> Shape:
            return (*values[:dim], value, *values[dim + 1 :])

        chunks = tuple(Chunk(replaced((0,) * len(shape), first), replaced(shape, size)) for first, size in ranges)
        return cls(shape, chunks, dim)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(math.prod(chunk.sizes) for chunk in self.chunks)

    def project(self, dims: Sequence[int]) -> WeightSlice:
        """Returns the projection on some dimensions of the weight; on the first one of a matrix, these are its rows."""

        def chosen(values: Shape) -> Shape:
            return tuple(values[dim] for dim in dims)

        chunks = dict.fromkeys(Chunk(chosen(chunk.offsets), chosen(chunk.sizes)) for chunk in self.chunks)
        return WeightSlice(chosen(self.shape), tuple(chunks), list(dims).index(self.dim) if self.dim in dims else 0)

    def take(self, whole: Tensor) -> Tensor:
        """Returns this slice of a whole weight, flat."""
        parts = [_narrow(whole.view(self.shape), chunk) for chunk in self.chunks]
        return (torch.cat(parts, dim=self.dim) if len(parts) > 1 else parts[0]).flatten()

    def put(self, flat: Tensor, whole: Tensor) -> None:
        """Writes the flat content of this slice to its place in a whole weight."""
        whole = whole.view(self.shape)
        if len(self.chunks) == 1:
            _narrow(whole, self.chunks[0]).copy_(flat.view(self.chunks[0].sizes))
            return
        widths = [chunk.sizes[self.dim] for chunk in self.chunks]
        first = self.chunks[0].sizes
        joined = flat.view(*first[: self.dim], sum(widths), *first[self.dim + 1 :])
        for chunk, part in zip(self.chunks, torch.split(joined, widths, dim=self.dim), strict=True):
            _narrow(whole, chunk).copy_(part)


@dataclass(frozen=True)
class ReplicaIndex:
    """Which of several equal replicas a rank holds: its index, and how many there are."""

    index: int = 0
    count: int = 1
    only_first: bool = False
    """Whether the first replica saves all, because ZeRO cuts the shards of the others at other places."""

    @classmethod
    def of_rank(cls, group: dist.ProcessGroup | None) -> ReplicaIndex:
        """Returns this rank's index in a group, each of whose ranks holds a replica. group: None for all ranks."""
        return cls(dist.get_rank(group), dist.get_world_size(group))

    def times(self, inner: ReplicaIndex) -> ReplicaIndex:
        """Returns the replica in a two-dimensional mesh of replicas, flattened; `inner` is along its last dimension."""
        only_first = self.only_first or inner.only_first
        return ReplicaIndex(self.index * inner.count + inner.index, self.count * inner.count, only_first)

    def part(self, length: int) -> tuple[int, int]:
        """Returns the range (first index, end) of `length` elements that this replica saves or sends."""
        if self.only_first:
            return (length if self.index else 0), length
        return length * self.index // self.count, length * (self.index + 1) // self.count


class ShardLocation(NamedTuple):
    """The place in the whole weight of this rank's part of a parameter, before ZeRO divides that part."""

    name: str
    """Hugging Face name of the weight."""
    weight_slice: WeightSlice
    replica: ReplicaIndex


@dataclass
class CheckpointShard:
    """A flat range of a weight slice, with its optimizer states. Tensors are an engine's own, or read from a file.

    An optimizer state of another shape, such as one value for each row of a matrix, has a shard of its own: that shard
    has no weight tensor, and its slice describes the state's shape.
    """

    name: str
    """Hugging Face name of the weight."""
    weight_slice: WeightSlice
    start: int
    """Index of the first element within the flat slice."""
    tensors: dict[str, Tensor]
    """One-dimensional tensors of equal length, by kind: `WEIGHT` and the optimizer's states, or one state with a
    shape of its own."""
    steps: Tensor | None = None
    """Number of updates that the optimizer has counted for it, a scalar; None if it does not count them."""
    replica: ReplicaIndex = ReplicaIndex()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return next(iter(self.tensors.values())).numel()

    def saved_part(self) -> CheckpointShard:
        """Returns the part of the shard that this replica saves; it may be empty."""
        first, end = self.replica.part(self.numel)
        tensors = {kind: tensor[first:end] for kind, tensor in self.tensors.items()}
        return CheckpointShard(self.name, self.weight_slice, self.start + first, tensors, self.steps)


def _narrow(whole: Tensor, chunk: Chunk) -> Tensor:
    for dim, (first, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(dim, first, size)
    return whole
