"""Whole matrices for optimizers that need them, wherever ranks hold only parts of them.

Each matrix has one owner among the ranks that hold parts of it. The owner receives all parts, computes, and returns to
each rank what belongs to its part: two all-to-all exchanges, in which a rank sends its share once and receives the
matrices that it owns, as Moonlight does (arXiv 2502.16982). Parts are described as those of a checkpoint, so the same
code serves partitions of ZeRO, slices of tensor parallelism, stages, experts, shards of FSDP2, and replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch import distributed as dist

from llmtrain.engines.runtime.agree import gather
from llmtrain.engines.state.held import HeldState
from llmtrain.engines.state.pieces import Region, Shape
from llmtrain.engines.state.save_load import HeldLists, PlaceOf, shape_of
from llmtrain.system.piece_headers import WEIGHT

Compute = Callable[[Tensor], Tensor]
"""Maps a whole matrix, or a stack of them, to a tensor of the same shape."""


@dataclass(frozen=True)
class MatrixPart:
    """What a rank holds of a matrix: a flat range of a region, within a tensor that the optimizer trains."""

    name: str
    """Hugging Face name of the matrix."""
    shape: Shape
    """Its shape: [rows, columns], or [matrices, rows, columns]."""
    region: Region
    start: int
    """Index of the first element within the flat region."""
    tensor: int
    """Index of the trained tensor."""
    offset: int
    """Index of the first element within the flat trained tensor."""
    length: int
    copy: tuple[int, int]
    """(index of this copy, number of copies) among the ranks that hold the part."""

    def share(self) -> tuple[int, int]:
        """Returns the range (first element, end) within the part that this copy sends."""
        index, copies = self.copy
        return self.length * index // copies, self.length * (index + 1) // copies


def whole_shape(own: Sequence[int], region: Region) -> Shape:
    """Returns the shape of a weight of which a rank holds a region of shape `own`. A region may use another view."""
    if len(own) == len(region.shape):
        return region.shape
    if len(own) == 1:
        return (math.prod(region.shape),)
    (rows, columns), elements = own, math.prod(region.shape)
    is_last = region.dim == len(region.shape) - 1
    return (rows, elements // rows) if is_last else (elements // columns, columns)


def parts_of(trained: list[Tensor], lists: HeldLists, place: PlaceOf) -> Iterator[tuple[HeldState, MatrixPart]]:
    """Yields each part of a weight that an optimizer holds on this rank, with its description; also those of vectors.

    trained: all that the optimizer trains on this rank. lists, place: what it holds of each parameter, and where that
    is in whole weights.
    """
    numbers = {id(one): number for number, one in enumerate(trained)}
    for held in chain.from_iterable(lists):
        name, region, copy = place(held.parameter)
        shape, number = whole_shape(shape_of(held.parameter), region), numbers[id(held.trained)]
        length = held.tensors[WEIGHT].numel()
        yield held, MatrixPart(name, shape, region, held.start, number, held.offset, length, copy)


class Route:
    """What a rank exchanges with each rank: its parts of that rank's matrices, and that rank's parts of its own."""

    def __init__(self, own: list[list[MatrixPart]], owned: list[list[MatrixPart]]) -> None:
        self.own = [one for some in own for one in some]
        self.owned = [one for some in owned for one in some]
        self.sent, self.received = (_sizes(parts, _width) for parts in (own, owned))
        self.answered, self.returned = (_sizes(parts, _length) for parts in (owned, own))


class WholeMatrices:
    """The matrices of which this rank holds parts, and the ranks that hold the others."""

    def __init__(self, own: list[MatrixPart], dtype: torch.dtype, device: torch.device) -> None:
        """own: the parts of this rank. dtype, device: of matrices that are sent and computed. Called by all ranks."""
        self.dtype, self.device = dtype, device
        by_rank = gather(own)
        self._rank = dist.get_rank() if len(by_rank) > 1 else 0
        self._group: dist.ProcessGroup | None = None
        self._ranks = [self._rank]
        for ranks in _connected(by_rank):
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if self._rank in ranks:
                self._ranks, self._group = ranks, group
        self._parts = {rank: by_rank[rank] for rank in self._ranks}
        self._routes: dict[tuple[int, ...], Route] = {}

    def compute(self, flats: dict[int, Tensor], compute: Compute) -> None:
        """Applies `compute` to whole matrices, and replaces this rank's parts of them by its parts of the results.

        flats: this rank's flat trained tensors by index. All ranks that hold parts of these matrices call it.
        """
        route = self._route(tuple(flats))
        sent = [
            flats[one.tensor][one.offset : one.offset + one.length][slice(*one.share())].to(self.dtype)
            for one in route.own
        ]
        received = self._exchange(sent, route.sent, route.received)
        results = _computed(received, route.owned, compute)
        answers = [results[one.name, one.region][one.start : one.start + one.length] for one in route.owned]
        returned = self._exchange(answers, route.answered, route.returned)
        for one, values in _split(returned, route.own, _length):
            flats[one.tensor][one.offset : one.offset + one.length].copy_(values)

    def scales(self, tensor: int, scale: Callable[[int, int], float]) -> Iterator[tuple[slice, float]]:
        """Yields the range of each part of a trained tensor, and the scale of its matrix, given rows and columns."""
        for one in self._parts[self._rank]:
            if one.tensor == tensor:
                yield slice(one.offset, one.offset + one.length), scale(*one.shape[-2:])

    def _route(self, tensors: tuple[int, ...]) -> Route:
        """Returns what this rank exchanges for some trained tensors, the same in every step."""
        if tensors not in self._routes:
            parts = {rank: [one for one in some if one.tensor in tensors] for rank, some in self._parts.items()}
            owners = _owners([one for some in parts.values() for one in some], self._ranks)
            own = [[one for one in parts[self._rank] if owners[one.name] == rank] for rank in self._ranks]
            owned = [[one for one in some if owners[one.name] == self._rank] for some in parts.values()]
            self._routes[tensors] = Route(own, owned)
        return self._routes[tensors]

    def _exchange(self, parts: list[Tensor], sizes: list[int], expected: list[int]) -> Tensor:
        """Sends each rank of the group its elements, `sizes` of them; returns those of all ranks."""
        sent = torch.cat([torch.empty(0, dtype=self.dtype, device=self.device), *parts])
        if self._group is None:
            return sent
        received = sent.new_empty(sum(expected))
        dist.all_to_all_single(received, sent, expected, sizes, group=self._group)
        return received


def _sizes(parts: list[list[MatrixPart]], size: Callable[[MatrixPart], int]) -> list[int]:
    return [sum(map(size, some)) for some in parts]


def _length(part: MatrixPart) -> int:
    return part.length


def _width(part: MatrixPart) -> int:
    first, end = part.share()
    return end - first


def _split(
    values: Tensor, parts: Iterable[MatrixPart], width: Callable[[MatrixPart], int]
) -> Iterator[tuple[MatrixPart, Tensor]]:
    first = 0
    for one in parts:
        yield one, values[first : first + width(one)]
        first += width(one)


def _computed(received: Tensor, parts: list[MatrixPart], compute: Compute) -> dict[tuple[str, Region], Tensor]:
    """Joins matrices from the received shares of parts; returns the flat regions of what is computed from them."""
    regions: dict[tuple[str, Region], Tensor] = {}
    for one, values in _split(received, parts, _width):
        flat = regions.setdefault((one.name, one.region), received.new_zeros(one.region.numel))
        flat[one.start + one.share()[0] : one.start + one.share()[1]] = values
    shapes = {one.name: one.shape for one in parts}
    for name, shape in shapes.items():
        whole = received.new_empty(math.prod(shape))
        own = [region for held, region in regions if held == name]
        for region in own:
            region.put(regions[name, region], whole)
        result = compute(whole.view(shape)).reshape(-1)
        for region in own:
            regions[name, region] = region.take(result)
    return regions


def _owners(parts: list[MatrixPart], ranks: list[int]) -> dict[str, int]:
    """Returns the owner of each matrix: from the largest to the smallest, the rank with the least work so far."""
    work = {one.name: math.prod(one.shape) * min(one.shape[-2:]) for one in parts}
    load, owners = dict.fromkeys(ranks, 0), dict[str, int]()
    for name in sorted(work, key=lambda name: (-work[name], name)):
        owner = min(ranks, key=lambda rank: load[rank])
        owners[name], load[owner] = owner, load[owner] + work[name]
    return owners


def _connected(by_rank: list[list[MatrixPart]]) -> list[list[int]]:
    """Returns the groups of ranks that hold parts of the same matrices, directly or through others."""
    groups: list[tuple[set[int], set[str]]] = []
    for rank, parts in enumerate(by_rank):
        ranks, names = {rank}, {one.name for one in parts}
        for group in [group for group in groups if group[1] & names]:
            groups.remove(group)
            ranks, names = ranks | group[0], names | group[1]
        groups.append((ranks, names))
    return sorted(sorted(ranks) for ranks, _ in groups)
