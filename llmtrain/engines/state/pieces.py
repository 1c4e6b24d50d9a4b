"""The state of a run as pieces: what each rank holds of each weight, under the weight's Hugging Face name.

Every strategy divides weights in its own way, into slices of matrices, experts or stages, and ZeRO divides the result
again into flat ranges. A piece contains its location in the whole weight, so that a rank of any other strategy finds
what it needs among the pieces of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a whole weight: a range in each dimension."""

    first: Shape
    """Index of the first element in each dimension."""
    size: Shape


@dataclass(frozen=True)
class Region:
    """The part of a weight that a rank, or a group of ranks under ZeRO, holds: boxes joined along one dimension."""

    shape: Shape
    """Shape of the whole weight, as it is viewed for the split."""
    boxes: tuple[Box, ...]
    dim: int = 0
    """Dimension along which the boxes are joined, if there are several."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Returns the region of a whole weight."""
        return cls(tuple(shape), (Box((0,) * len(shape), tuple(shape)),))

    @classmethod
    def ranges(cls, shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> Region:
        """Returns a region: the given ranges, each (first index, length), of dimension `dim`, and all of the others."""
        shape = tuple(shape)

        def replaced(values: Shape, value: int) -> Shape:
            return (*values[:dim], value, *values[dim + 1 :])

        boxes = tuple(Box(replaced((0,) * len(shape), first), replaced(shape, size)) for first, size in ranges)
        return cls(shape, boxes, dim)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(math.prod(box.size) for box in self.boxes)

    def over(self, dims: Sequence[int]) -> Region:
        """Returns its projection on some dimensions of the weight; on the first one of a matrix, these are its rows."""

        def chosen(values: Shape) -> Shape:
            return tuple(values[dim] for dim in dims)

        boxes = dict.fromkeys(Box(chosen(box.first), chosen(box.size)) for box in self.boxes)
        return Region(chosen(self.shape), tuple(boxes), list(dims).index(self.dim) if self.dim in dims else 0)

    def take(self, whole: Tensor) -> Tensor:
        """Returns this region of a whole weight, flat."""
        parts = [_part(whole.view(self.shape), box) for box in self.boxes]
        return (torch.cat(parts, dim=self.dim) if len(parts) > 1 else parts[0]).flatten()

    def put(self, flat: Tensor, whole: Tensor) -> None:
        """Writes the flat content of this region to its place in a whole weight."""
        whole = whole.view(self.shape)
        if len(self.boxes) == 1:
            _part(whole, self.boxes[0]).copy_(flat.view(self.boxes[0].size))
            return
        widths = [box.size[self.dim] for box in self.boxes]
        first = self.boxes[0].size
        joined = flat.view(*first[: self.dim], sum(widths), *first[self.dim + 1 :])
        for box, part in zip(self.boxes, torch.split(joined, widths, dim=self.dim), strict=True):
            _part(whole, box).copy_(part)


@dataclass
class Piece:
    """A flat range of a region with its optimizer states; tensors are an engine's live ones, or read from a file.

    A state with a shape of its own, such as one value for each row of a matrix, is in a piece without the weight, whose
    region has that shape.
    """

    name: str
    """Hugging Face name of the weight."""
    region: Region
    start: int
    """Index of the first element within the flat region."""
    tensors: dict[str, Tensor]
    """One-dimensional tensors of equal length, by kind: `WEIGHT` and the optimizer's states, or one state with a
    shape of its own."""
    steps: Tensor | None = None
    """Number of updates that the optimizer has counted for it, a scalar; None if it does not count them."""
    copy: tuple[int, int] = (0, 1)
    """(index of this copy, number of copies) among the ranks that hold the piece; each copy saves its share."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return next(iter(self.tensors.values())).numel()

    def share(self) -> Piece:
        """Returns the part of the piece that this copy saves; it may be empty."""
        index, copies = self.copy
        first, last = self.numel * index // copies, self.numel * (index + 1) // copies
        tensors = {kind: tensor[first:last] for kind, tensor in self.tensors.items()}
        return Piece(self.name, self.region, self.start + first, tensors, self.steps)


def _part(whole: Tensor, box: Box) -> Tensor:
    for dim, (first, size) in enumerate(zip(box.first, box.size, strict=True)):
        whole = whole.narrow(dim, first, size)
    return whole
