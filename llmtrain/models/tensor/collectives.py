"""Differentiable collectives of a tensor parallel group: the backward pass of each is another collective.

They are those of Megatron-LM (`tensor_parallel/mappings.py`). Activations are [batch, sequence, hidden]. On each rank
an activation is whole, sharded along `hidden`, sharded along `sequence`, or partial: the activation is then the sum
over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

Forward = Callable[..., Any]


class Communicator(Protocol):
    """The collectives of a group of tensor or expert parallel ranks, as one of its ranks calls them."""

    rank: int
    """Index of this rank in the group."""
    size: int
    """Number of ranks in the group."""

    def all_reduce(self, value: Tensor) -> Tensor:
        """Returns the sum over all ranks as a new tensor."""

    def reduce_scatter(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the sum, over all ranks, of their `values[rank]`. values: one tensor for each rank."""

    def all_gather(self, value: Tensor) -> list[Tensor]:
        """Returns the values of all ranks, in the order of the ranks."""

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends the first `sent[0]` rows to rank 0, and so on; returns the `received` rows in the order of ranks."""


class TorchCommunicator:
    """A `Communicator` of processes, with a torch process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, value: Tensor) -> Tensor:
        """All-reduces a copy."""
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total

    def reduce_scatter(self, values: Sequence[Tensor]) -> Tensor:
        """Reduces and scatters tensors of equal shape."""
        part = torch.empty_like(values[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(part, torch.cat(list(values)), group=self._group)
        return part

    def all_gather(self, value: Tensor) -> list[Tensor]:
        """All-gathers tensors of equal shape."""
        value = value.contiguous()
        parts = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(parts, value, group=self._group)
        return parts

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchanges rows of equal width."""
        _groups[self._group.group_name] = self._group
        arrived: Tensor = _all_to_all(rows, list(sent), list(received), self._group.group_name)
        return arrived


_groups: dict[str, dist.ProcessGroup] = {}
"""By name, the groups of `_all_to_all`: an operation takes no objects."""


@torch.library.custom_op("llmtrain::all_to_all", mutates_args=())
def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """An operation, so that a selective checkpoint can keep the rows that arrive."""
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=_groups[group])
    return arrived


@dataclass(frozen=True)
class Shard:
    """How a tensor is sharded: each of its `blocks` equal blocks along `dim` is divided into equal parts, one per rank.

    Weights that are stored as one tensor (gate and up) are several blocks, because each rank needs a part of each.
    """

    dim: int
    blocks: int = 1

    def part(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Returns the shard of a rank, contiguous. ranks: size of the group."""
        blocks = whole.chunk(self.blocks, self.dim)
        return torch.cat([block.chunk(ranks, self.dim)[rank] for block in blocks], self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins the shards of all ranks."""
        chunks = [part.chunk(self.blocks, self.dim) for part in parts]
        return torch.cat([chunk[block] for block in range(self.blocks) for chunk in chunks], self.dim)


HIDDEN_SHARD, SEQUENCE_SHARD = Shard(-1), Shard(1)
"""Shards of an activation [batch, sequence, hidden]."""
ROW_SHARD = Shard(0)
"""Shards of the experts of a layer, or of an activation [tokens, hidden]."""


def shard_of(tensor: Tensor) -> Shard | None:
    """Returns how a parameter is sharded; None for whole parameters and for buffers."""
    shard: Shard | None = getattr(tensor, "tensor_shard", None)
    return shard


class _Collective(torch.autograd.Function):
    """A function of activations with a given backward pass; both may be collectives."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward: Forward, backward: Forward) -> Tensor:
        ctx.backward_collective = backward
        result: Tensor = forward(value)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_collective(gradient), None, None


def _apply(value: Tensor, forward: Forward, backward: Forward) -> Tensor:
    result: Tensor = _Collective.apply(value, forward, backward)  # type: ignore[no-untyped-call]
    return result


def _identity(value: Tensor) -> Tensor:
    return value.view_as(value)


def _all_gather(shard: Shard, group: Communicator) -> Forward:
    return lambda value: shard.whole(group.all_gather(value))


def _own_shard(shard: Shard, group: Communicator) -> Forward:
    return lambda value: shard.part(value, group.rank, group.size)


def _reduce_scatter(group: Communicator) -> Forward:
    return lambda value: group.reduce_scatter(value.chunk(group.size, SEQUENCE_SHARD.dim))


def copy_to_tensor_parallel(value: Tensor, group: Communicator) -> Tensor:
    """Passes a whole activation to split modules. Backward: all-reduces the partial gradients."""
    return _apply(value, _identity, group.all_reduce)


def reduce_from_tensor_parallel(value: Tensor, group: Communicator) -> Tensor:
    """All-reduces a partial activation. Backward: passes the whole gradient on."""
    return _apply(value, group.all_reduce, _identity)


def gather_from_tensor_parallel(value: Tensor, group: Communicator) -> Tensor:
    """All-gathers an activation along `hidden`. Backward: keeps this rank's shard of the whole gradient."""
    return _apply(value, _all_gather(HIDDEN_SHARD, group), _own_shard(HIDDEN_SHARD, group))


def scatter_to_tensor_parallel(value: Tensor, group: Communicator, shard: Shard = HIDDEN_SHARD) -> Tensor:
    """Keeps this rank's shard of a whole activation, by default along `hidden`. Backward: all-gathers the gradient."""
    return _apply(value, _own_shard(shard, group), _all_gather(shard, group))


def gather_from_sequence_parallel(value: Tensor, group: Communicator) -> Tensor:
    """All-gathers an activation along `sequence`. Backward: keeps this rank's shard of the whole gradient."""
    return _apply(value, _all_gather(SEQUENCE_SHARD, group), _own_shard(SEQUENCE_SHARD, group))


def gather_to_tensor_parallel(value: Tensor, group: Communicator) -> Tensor:
    """All-gathers an activation along `sequence` for split modules. Backward: reduce-scatters the partial gradients."""
    return _apply(value, _all_gather(SEQUENCE_SHARD, group), _reduce_scatter(group))


def scatter_to_sequence_parallel(value: Tensor, group: Communicator) -> Tensor:
    """Keeps this rank's shard, along `sequence`, of a whole activation. Backward: all-gathers the gradient."""
    return _apply(value, _own_shard(SEQUENCE_SHARD, group), _all_gather(SEQUENCE_SHARD, group))


def reduce_scatter_to_sequence_parallel(value: Tensor, group: Communicator) -> Tensor:
    """Reduce-scatters a partial activation along `sequence`. Backward: all-gathers the gradient."""
    return _apply(value, _reduce_scatter(group), _all_gather(SEQUENCE_SHARD, group))


def exchange_rows(value: Tensor, sent: Sequence[int], received: Sequence[int], group: Communicator) -> Tensor:
    """Sends rows to ranks, and returns those received (`Communicator.all_to_all`). Backward: sends gradients back."""
    return _apply(
        value,
        lambda rows: group.all_to_all(rows, sent, received),
        lambda gradient: group.all_to_all(gradient, received, sent),
    )


def own_rows(value: Tensor, group: Communicator) -> Tensor:
    """Returns this rank's part of the rows, after zeros have been appended until they are divisible."""
    lacking = -len(value) % group.size
    if lacking:
        value = torch.cat([value, value.new_zeros(lacking, *value.shape[1:])])
    return ROW_SHARD.part(value, group.rank, group.size)


def scatter_rows(value: Tensor, group: Communicator) -> Tensor:
    """Returns `own_rows` of a whole activation. Backward: all-gathers the gradient."""
    if group.size == 1:
        return value
    rows = len(value)
    return _apply(value, lambda whole: own_rows(whole, group), lambda part: _all_rows(part, rows, group))


def gather_rows(part: Tensor, rows: int, group: Communicator) -> Tensor:
    """Returns the whole activation of which each rank has its `own_rows`. Backward: keeps those of the gradient.

    rows: of the whole activation.
    """
    if group.size == 1:
        return part
    return _apply(part, lambda own: _all_rows(own, rows, group), lambda gradient: own_rows(gradient, group))


def _all_rows(part: Tensor, rows: int, group: Communicator) -> Tensor:
    return ROW_SHARD.whole(group.all_gather(part))[:rows]


def divide_gradient(value: Tensor, group: Communicator) -> Tensor:
    """Returns the value. Backward: divides the gradient, which is equal on all ranks, by their number."""
    return _apply(value, _identity, lambda gradient: gradient / group.size)


def all_reduce_gradient(parameter: Tensor, group: Communicator) -> None:
    """Registers a hook that all-reduces the gradient of a whole parameter, of which each rank computes a part.

    A tensor hook runs on the gradient of one backward pass, before that gradient is accumulated.
    """
    if parameter.requires_grad and not has_reduced_gradient(parameter):
        parameter.register_hook(group.all_reduce)  # type: ignore[no-untyped-call]
        parameter.gradient_is_reduced = True  # type: ignore[attr-defined]


def has_reduced_gradient(parameter: Tensor) -> bool:
    """Whether a hook all-reduces the gradient of a parameter."""
    return hasattr(parameter, "gradient_is_reduced")


class TensorParallelBlock:
    """The collectives at the inputs and outputs of split modules, such as those of an attention.

    Query, key and value projections take the same tensor, so they share one copy of it: autograd adds up their
    gradients before it runs the backward pass of the copy, and the sum is all-reduced once. The blocks of
    `sequence_parallel.py` have other collectives.
    """

    def __init__(self, group: Communicator, is_single_module: bool = False) -> None:
        """is_single_module: whether the block is a single module, such as the head or a matrix of an adapter."""
        self.group = group
        self._is_single_module = is_single_module
        self._shared_input: tuple[Tensor, Tensor] | None = None
        """The input of the first module, and its copy."""

    def copy_shared_input(self, value: Tensor) -> Tensor:
        """Returns the copy of a whole activation; the same copy for all modules of the block with this input."""
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value
        if self._is_single_module:
            return copy_to_tensor_parallel(value, self.group)
        if self._shared_input is None or self._shared_input[0] is not value:
            self._shared_input = value, copy_to_tensor_parallel(value, self.group)
        return self._shared_input[1]

    def copy_input(self, value: Tensor) -> Tensor:
        """Returns a copy of a whole activation, for a module that is the only one with this input."""
        return copy_to_tensor_parallel(value, self.group)

    def reduce_output(self, partial: Tensor) -> Tensor:
        """Returns the output of the block, given this rank's partial one."""
        return reduce_from_tensor_parallel(partial, self.group)

    def release_input(self) -> None:
        """Drops the copied input; called when the last module of the block has its input."""
        self._shared_input = None

    def prepare_whole_parameter(self, parameter: Tensor) -> None:
        """Prepares an unsplit parameter of the block, such as a bias; here its gradient is whole on each rank."""
