"""The weights of a model one by one, as detailed as memory needs: shapes, with equal layers stored once.

Totals are not enough for memory: ZeRO-3 pads each parameter and does not shard small ones, tensor parallel ranks split
matrices but not norms, and vectors are in an optimizer group of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

from llmtrain.recipe import Part

BLOCK = 64
"""Number of elements that share a scale: the block size for weights in QLoRA's paper."""
BLOCKS = 256
"""Number of scales that share a scale of their own: the paper's block size for scales."""
TABLES = 4 * (2 * 256 + 256)
"""Bytes of the table with the values of all codes; each rank has one."""
WORKSPACE = 6
"""Bytes for each element of a weight while it is made whole: its fp32 value, and an index or the rounded value."""


class Weight(Part):
    """A parameter, as the model stores it."""

    name: str
    """Its name within its layer (`self_attn.q_proj.weight`), or within the model."""
    shape: tuple[int, ...]
    """Its shape."""
    trained: bool = True
    """Whether it is trained; other weights are frozen."""
    packed: bool = False
    """Whether it is frozen and held in 4 bits (`model.quantize`)."""
    transposed: bool = False
    """Whether the model stores the transpose of `shape`, or of each matrix of a stack."""
    kind: Literal["layer", "stack", "other"] = "layer"
    """What it belongs to, if it has two or more dimensions: a linear layer or an embedding; a stack of the matrices of
    experts, which grouped products multiply with (`llmtrain.models.experts`); or something else, such as a router."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether weight decay applies to it: two or more dimensions."""
        return len(self.shape) >= 2

    @property
    def stored(self) -> tuple[int, ...]:
        """Its shape in the model's own tensor."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    @property
    def matrices(self) -> int:
        """Number of matrices of a stack; 1 for others."""
        return math.prod(self.shape[:-2])

    @property
    def lines(self) -> int:
        """Number of rows and columns of a matrix, or of all matrices of a stack; 0 for vectors."""
        return self.elements // self.shape[-1] + self.elements // self.shape[-2] if self.is_matrix else 0

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to the experts of a mixture."""
        return ".experts." in self.name

    @property
    def is_adapter(self) -> bool:
        """Whether an adapter has added it to a layer or parameter (`llmtrain.plan.facts.trained`)."""
        return ".lora_" in self.name

    @property
    def module(self) -> str:
        """The last part of the name of its module; for the weight of an adapter, of the layer or stack beside it."""
        return self.name.partition(".lora_")[0].removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


class LayerRun(Part):
    """Neighbouring decoder layers that are equal."""

    layers: int
    """Number of layers."""
    weights: tuple[Weight, ...]
    """Weights of each layer."""


class Weights(Part):
    """All weights of a model; tied ones once."""

    prefix: str = ""
    """Name of the list of decoder layers; other weights have their names in the whole model."""
    embedding: tuple[Weight, ...]
    """Input tables."""
    runs: tuple[LayerRun, ...]
    """The decoder layers, in order."""
    outside: tuple[Weight, ...]
    """The final norm, and everything else outside layers."""
    head: tuple[Weight, ...]
    """The output projection; the embedding's table if it is tied to it."""
    tied: bool
    """Whether `head` is the embedding."""

    @property
    def elements(self) -> int:
        """Number of parameters of the whole model."""
        return sum(weight.elements for weight in self.of_layers(0, self.layers, first=True, last=True))

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return sum(run.layers for run in self.runs)

    @cached_property
    def runs_of_layers(self) -> tuple[int, ...]:
        """For each decoder layer, the index of its run."""
        return tuple(number for number, run in enumerate(self.runs) for _ in range(run.layers))

    def of_layers(self, first_layer: int, end: int, *, first: bool, last: bool) -> Iterator[Weight]:
        """Yields the weights of a stage with layers [first_layer, end), in the order of the model's parameters.

        A tied weight is at the place of the embedding, even on a last stage that has no other use for the embedding. It
        appears once if a stage has both ends of the model. first, last: whether the stage has these ends.
        """
        if first:
            yield from self.embedding
        elif last and self.tied:
            yield from self.head
        for index in range(first_layer, end):
            yield from self.layer(index)
        if last:
            yield from self.outside
            if not self.tied:
                yield from self.head

    def layer(self, index: int) -> tuple[Weight, ...]:
        """Returns the weights of one layer."""
        return self.runs[self.runs_of_layers[index]].weights

    def in_layers(self) -> Iterator[tuple[str, Weight]]:
        """Yields the weights of all layers, with their names in the whole model."""
        for index in range(self.layers):
            yield from ((f"{self.prefix}.{index}.{weight.name}", weight) for weight in self.layer(index))


def runs_of(layers: Iterable[Sequence[Weight]]) -> tuple[LayerRun, ...]:
    """Returns the layers, with equal neighbours joined."""
    return tuple(LayerRun(layers=len(list(alike)), weights=weights) for weights, alike in groupby(map(tuple, layers)))


def packed_bytes(elements: int) -> int:
    """Returns the bytes of a weight: half a byte per element, one per block, four per 256 blocks and for the mean."""
    blocks = -(-elements // BLOCK)
    return -(-elements // 2) + blocks + 4 * (-(-blocks // BLOCKS) + 1)


@dataclass(frozen=True)
class HeldRows:
    """The part of each row of a matrix that a rank, or under ZeRO a group of ranks, holds.

    The held elements are numbered row by row. A block consists of the elements of a row that share a scale of an
    optimizer's moment. The blocks that are held, whole or in part, are numbered in the same order. They begin at fixed
    columns of the whole matrix, so they are the same under every plan.
    """

    width: int
    """Number of elements of a whole row."""
    columns: tuple[tuple[int, int], ...]
    """Ranges of columns, as (first column, number of columns)."""
    block: int
    """Number of elements of a block; the last one of a row may have fewer."""

    @cached_property
    def elements(self) -> int:
        """Number of held elements of a row."""
        return sum(number for _, number in self.columns)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Ranges of blocks of the whole row, as (first block, number of blocks), one for each range of columns."""
        ends = ((first, -(-(first + number) // self.block)) for first, number in self.columns)
        return tuple((first // self.block, end - first // self.block) for first, end in ends)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """For each held block of a row, whole or in part: its index among the blocks of the whole row."""
        return tuple(block for first, number in self.spans for block in range(first, first + number))

    @cached_property
    def in_row(self) -> int:
        """Number of blocks of the whole row."""
        return -(-self.width // self.block)

    @cached_property
    def cut(self) -> frozenset[int]:
        """Those blocks of the whole row, by index, that are held only in part."""
        ends = {end for first, number in self.columns for end in (first, first + number)}
        return frozenset(end // self.block for end in ends if end % self.block and end != self.width)

    def number(self, element: int) -> int:
        """Returns the number of the block of an element."""
        row, column = divmod(element, self.elements)
        before = row * len(self.held)
        for (first, number), (block, blocks) in zip(self.columns, self.spans, strict=True):
            if column < number:
                return before + (first + column) // self.block - block
            column, before = column - number, before + blocks
        raise AssertionError("a column is within one of the ranges")

    def blocks(self, first: int, end: int) -> range:
        """Returns the numbers of the blocks of a range of elements."""
        return range(self.number(first), self.number(end - 1) + 1) if end > first else range(0)

    def place(self, number: int) -> tuple[int, int]:
        """Returns the row of a numbered block, and its index among the blocks of the whole row."""
        row, own = divmod(number, len(self.held))
        return row, self.held[own]

    def is_cut(self, element: int) -> bool:
        """Whether an element and the one before it are in the same block."""
        return element % self.elements > 0 and self.number(element - 1) == self.number(element)
