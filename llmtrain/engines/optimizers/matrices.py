"""Gathers whole matrices for optimizers that need them, wherever ranks hold only shards.

Each matrix has one owner among the ranks that hold shards of it. The owner receives all shards, computes, and returns
each rank's shard of the result. These are two all-to-all exchanges, in which a rank sends its shards once and receives
the matrices that it owns, as Moonlight does (arXiv 2502.16982). Shards are located as those of a checkpoint, so the
same code serves partitions of ZeRO, slices of tensor parallelism, stages, experts, shards of FSDP2, and replicas.
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
from llmtrain.engines.state.optimizer_shards import OptimizerShard, OptimizerShardLists
from llmtrain.engines.state.save_load import Locate, shape_of
from llmtrain.engines.state.shards import ReplicaIndex, Shape, WeightSlice
from llmtrain.system.piece_headers import WEIGHT

Compute = Callable[[Tensor], Tensor]
"""Maps a whole matrix, or a stack of them, to a tensor of the same shape."""


@dataclass(frozen=True)
class LocatedShard:
    """Where an optimizer's shard of a weight is: in the whole weight, and in a tensor that the optimizer trains."""

    name: str
    """Hugging Face name of the weight."""
    shape: Shape
    """Shape of the whole weight; of a matrix, [rows, columns] or [matrices, rows, columns]."""
    weight_slice: WeightSlice
    start: int
    """Index of the first element within the flat slice."""
    tensor: int
    """Index of the trained tensor."""
    offset: int
    """Index of the first element within the flat trained tensor."""
    length: int
    replica: ReplicaIndex

    def sent_range(self) -> tuple[int, int]:
        """Returns the range (first element, end) within the shard that this replica sends."""
        return self.replica.part(self.length)


def whole_shape(local: Sequence[int], weight_slice: WeightSlice) -> Shape:
    """Returns the shape of a whole weight of which a rank holds a tensor of shape `local`.

    weight_slice: of that tensor; it may view the weight in another shape.
    """
    if len(local) == len(weight_slice.shape):
        return weight_slice.shape
    if len(local) == 1:
        return (math.prod(weight_slice.shape),)
    (rows, columns), elements = local, math.prod(weight_slice.shape)
    is_last = weight_slice.dim == len(weight_slice.shape) - 1
    return (rows, elements // rows) if is_last else (elements // columns, columns)


def located_shards(
    trained: list[Tensor], lists: OptimizerShardLists, locate: Locate
) -> Iterator[tuple[OptimizerShard, LocatedShard]]:
    """Yields each shard that an optimizer holds on this rank, with its location.

    trained: all that the optimizer trains on this rank. lists: the optimizer's shards. locate: returns where what this
    rank holds of a parameter is in the whole weight.
    """
    indices = {id(tensor): index for index, tensor in enumerate(trained)}
    for shard in chain.from_iterable(lists):
        name, weight_slice, replica = locate(shard.parameter)
        shape, index = whole_shape(shape_of(shard.parameter), weight_slice), indices[id(shard.trained)]
        length = shard.tensors[WEIGHT].numel()
        yield shard, LocatedShard(name, shape, weight_slice, shard.start, index, shard.offset, length, replica)


class AllToAll:
    """What a rank exchanges with each rank: its shards of that rank's matrices, and that rank's shards of its own."""

    def __init__(self, sent: list[list[LocatedShard]], owned: list[list[LocatedShard]]) -> None:
        """sent: for each rank, this rank's shards of the matrices that it owns. owned: its shards of this rank's."""
        self.sent = [shard for shards in sent for shard in shards]
        self.owned = [shard for shards in owned for shard in shards]
        self.sent_sizes, self.received_sizes = (_sizes(shards, _sent_length) for shards in (sent, owned))
        self.answered_sizes, self.returned_sizes = (_sizes(shards, _length) for shards in (owned, sent))


class WholeMatrices:
    """The matrices of which this rank holds shards, and the ranks that hold the others."""

    def __init__(self, shards: list[LocatedShard], dtype: torch.dtype, device: torch.device) -> None:
        """shards: of this rank. dtype, device: of matrices that are sent and computed. Called by all ranks."""
        self.dtype, self.device = dtype, device
        by_rank = gather(shards)
        self._rank = dist.get_rank() if len(by_rank) > 1 else 0
        self._group: dist.ProcessGroup | None = None
        self._ranks = [self._rank]
        for ranks in _connected(by_rank):
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if self._rank in ranks:
                self._ranks, self._group = ranks, group
        self._shards = {rank: by_rank[rank] for rank in self._ranks}
        self._exchanges: dict[tuple[int, ...], AllToAll] = {}

    def compute(self, flats: dict[int, Tensor], compute: Compute) -> None:
        """Applies `compute` to whole matrices, and replaces this rank's shards of them by its shards of the results.

        flats: this rank's flat trained tensors by index. All ranks that hold shards of these matrices call it.
        """
        exchange = self._exchange_of(tuple(flats))
        sent = [
            flats[shard.tensor][shard.offset : shard.offset + shard.length][slice(*shard.sent_range())].to(self.dtype)
            for shard in exchange.sent
        ]
        received = self._all_to_all(sent, exchange.sent_sizes, exchange.received_sizes)
        results = _computed(received, exchange.owned, compute)
        answers = [
            results[shard.name, shard.weight_slice][shard.start : shard.start + shard.length]
            for shard in exchange.owned
        ]
        returned = self._all_to_all(answers, exchange.answered_sizes, exchange.returned_sizes)
        for shard, values in _split(returned, exchange.sent, _length):
            flats[shard.tensor][shard.offset : shard.offset + shard.length].copy_(values)

    def scales(self, tensor: int, scale: Callable[[int, int], float]) -> Iterator[tuple[slice, float]]:
        """Yields the range of each shard of a trained tensor, and the scale of its matrix, given rows and columns."""
        for shard in self._shards[self._rank]:
            if shard.tensor == tensor:
                yield slice(shard.offset, shard.offset + shard.length), scale(*shard.shape[-2:])

    def _exchange_of(self, tensors: tuple[int, ...]) -> AllToAll:
        """Returns what this rank exchanges for some trained tensors, the same in every step."""
        if tensors not in self._exchanges:
            by_rank = {
                rank: [shard for shard in shards if shard.tensor in tensors] for rank, shards in self._shards.items()
            }
            owners = _owners([shard for shards in by_rank.values() for shard in shards], self._ranks)
            sent = [[shard for shard in by_rank[self._rank] if owners[shard.name] == rank] for rank in self._ranks]
            owned = [[shard for shard in shards if owners[shard.name] == self._rank] for shards in by_rank.values()]
            self._exchanges[tensors] = AllToAll(sent, owned)
        return self._exchanges[tensors]

    def _all_to_all(self, parts: list[Tensor], sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        """Sends each rank of the group its elements, and returns those that all ranks have sent to this one."""
        sent = torch.cat([torch.empty(0, dtype=self.dtype, device=self.device), *parts])
        if self._group is None:
            return sent
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._group)
        return received


def _sizes(lists: list[list[LocatedShard]], size: Callable[[LocatedShard], int]) -> list[int]:
    return [sum(map(size, shards)) for shards in lists]


def _length(shard: LocatedShard) -> int:
    return shard.length


def _sent_length(shard: LocatedShard) -> int:
    first, end = shard.sent_range()
    return end - first


def _split(
    values: Tensor, shards: Iterable[LocatedShard], length: Callable[[LocatedShard], int]
) -> Iterator[tuple[LocatedShard, Tensor]]:
    first = 0
    for shard in shards:
        yield shard, values[first : first + length(shard)]
        first += length(shard)


def _computed(received: Tensor, shards: list[LocatedShard], compute: Compute) -> dict[tuple[str, WeightSlice], Tensor]:
    """Joins matrices from the received parts of shards; returns the flat slices of what is computed from them."""
    slices: dict[tuple[str, WeightSlice], Tensor] = {}
    for shard, values in _split(received, shards, _sent_length):
        weight_slice, (first, end) = shard.weight_slice, shard.sent_range()
        flat = slices.setdefault((shard.name, weight_slice), received.new_zeros(weight_slice.numel))
        flat[shard.start + first : shard.start + end] = values
    shapes = {shard.name: shard.shape for shard in shards}
    for name, shape in shapes.items():
        whole = received.new_empty(math.prod(shape))
        slices_of_matrix = [weight_slice for other, weight_slice in slices if other == name]
        for weight_slice in slices_of_matrix:
            weight_slice.put(slices[name, weight_slice], whole)
        result = compute(whole.view(shape)).reshape(-1)
        for weight_slice in slices_of_matrix:
            slices[name, weight_slice] = weight_slice.take(result)
    return slices


def _owners(shards: list[LocatedShard], ranks: list[int]) -> dict[str, int]:
    """Returns the owner of each matrix: from the largest to the smallest, the rank with the least work so far."""
    work = {shard.name: math.prod(shard.shape) * min(shard.shape[-2:]) for shard in shards}
    load, owners = dict.fromkeys(ranks, 0), dict[str, int]()
    for name in sorted(work, key=lambda name: (-work[name], name)):
        owner = min(ranks, key=lambda rank: load[rank])
        owners[name], load[owner] = owner, load[owner] + work[name]
    return owners


def _connected(by_rank: list[list[LocatedShard]]) -> list[list[int]]:
    """Returns the groups of ranks that hold shards of the same matrices, directly or through others."""
    groups: list[tuple[set[int], set[str]]] = []
    for rank, shards in enumerate(by_rank):
        ranks, names = {rank}, {shard.name for shard in shards}
        for group in [group for group in groups if group[1] & names]:
            groups.remove(group)
            ranks, names = ranks | group[0], names | group[1]
        groups.append((ranks, names))
    return sorted(sorted(ranks) for ranks, _ in groups)
