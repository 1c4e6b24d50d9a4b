"""The state of a run as pieces: what each rank holds of each weight, under the weight's Hugging Face name.

Every strategy cuts weights in its own way, into slices of matrices, experts, stages, and ZeRO again into flat
ranges of what is left. A piece says where it lies in the whole weight, so that a rank of any other strategy
finds in the pieces of all ranks what it needs itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from llmtrain.piece_heads import WEIGHT

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a whole weight: of each dimension a range."""

    first: Shape
    """Index of the first element in each dimension."""
    size: Shape


@dataclass(frozen=True)
class Region:
    """What a rank, or a group of ranks under ZeRO, holds of a weight: boxes joined along one dimension."""

    shape: Shape
    """Of the whole weight, as it is viewed for the cut."""
    boxes: tuple[Box, ...]
    dim: int = 0
    """Along which the boxes are joined, where there are several."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a weight."""
        return cls(tuple(shape), (Box((0,) * len(shape), tuple(shape)),))

    @classmethod
    def ranges(cls, shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> Region:
        """Of dimension `dim` the given ranges, each a first index and a length; of the others everything."""
        shape = tuple(shape)

        def replaced(values: Shape, value: int) -> Shape:
            return (*values[:dim], value, *values[dim + 1 :])

        boxes = tuple(Box(replaced((0,) * len(shape), first), replaced(shape, size)) for first, size in ranges)
        return cls(shape, boxes, dim)

    @property
    def numel(self) -> int:
        """Elements held."""
        return sum(math.prod(box.size) for box in self.boxes)

    def take(self, whole: Tensor) -> Tensor:
        """What the region is of a whole weight, flat."""
        parts = [_part(whole.view(self.shape), box) for box in self.boxes]
        return (torch.cat(parts, dim=self.dim) if len(parts) > 1 else parts[0]).flatten()

    def put(self, flat: Tensor, whole: Tensor) -> None:
        """Writes what the region holds, flat, to its place in a whole weight."""
        whole = whole.view(self.shape)
        if len(self.boxes) == 1:
            _part(whole, self.boxes[0]).copy_(flat.view(self.boxes[0].size))
            return
        widths = [box.size[self.dim] for box in self.boxes]
        first = self.boxes[0].size
        joined = flat.view(*first[: self.dim], sum(widths), *first[self.dim + 1 :])
        for box, part in zip(self.boxes, torch.split(joined, widths, dim=self.dim), strict=True):
            _part(whole, box).copy_(part)

    def to_json(self) -> dict[str, Any]:
        """JSON values that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Region:
        """What `to_json` wrote."""
        boxes = tuple(Box(tuple(box["first"]), tuple(box["size"])) for box in values["boxes"])
        return cls(tuple(values["shape"]), boxes, values["dim"])


@dataclass
class Piece:
    """A flat range of a region, and what an optimizer keeps for it; live tensors of an engine, or read ones."""

    name: str
    """Hugging Face name of the weight."""
    region: Region
    start: int
    """Index of the first element within the flat region."""
    tensors: dict[str, Tensor]
    """By kind, one-dimensional and equally long: `WEIGHT` and an optimizer's."""
    steps: Tensor | None = None
    """Updates that the optimizer has counted for it, a scalar; None where it keeps none."""
    copy: tuple[int, int] = (0, 1)
    """Which copy this is, of how many that other ranks hold: each saves its share."""

    @property
    def numel(self) -> int:
        """Elements."""
        return self.tensors[WEIGHT].numel()

    def share(self) -> Piece:
        """The part of it that this copy saves, maybe empty."""
        index, copies = self.copy
        first, last = self.numel * index // copies, self.numel * (index + 1) // copies
        tensors = {kind: tensor[first:last] for kind, tensor in self.tensors.items()}
        return Piece(self.name, self.region, self.start + first, tensors, self.steps)


def _part(whole: Tensor, box: Box) -> Tensor:
    for dim, (first, size) in enumerate(zip(box.first, box.size, strict=True)):
        whole = whole.narrow(dim, first, size)
    return whole
