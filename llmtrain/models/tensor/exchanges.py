"""The exchanges of tensor parallel ranks: collectives whose backward passes are other collectives.

Activations are [batch, T, width]. They are whole on each rank, slices of the width, slices of the sequence, or partial:
to be summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

Forward = Callable[..., Any]


class Ranks(Protocol):
    """The tensor parallel ranks that share a model, as seen by one of them."""

    rank: int
    size: int

    def sum(self, value: Tensor) -> Tensor:
        """Returns the sum over all ranks as a new tensor, which is equal on all of them."""

    def sum_own(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the sum, over all ranks, of what each has for this one. values: what this rank has for each rank."""

    def gather(self, value: Tensor) -> list[Tensor]:
        """Returns the values of all ranks, in the order of the ranks."""


class GroupRanks:
    """Implements `Ranks` with a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, value: Tensor) -> Tensor:
        """All-reduces a copy."""
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total

    def sum_own(self, values: Sequence[Tensor]) -> Tensor:
        """Reduces and scatters tensors of equal shape."""
        own = torch.empty_like(values[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(own, torch.cat(list(values)), group=self._group)
        return own

    def gather(self, value: Tensor) -> list[Tensor]:
        """All-gathers tensors of equal shape."""
        value = value.contiguous()
        parts = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(parts, value, group=self._group)
        return parts


@dataclass(frozen=True)
class Shard:
    """The slicing of a parameter: each of `blocks` equal blocks is cut along `dim` into equal parts.

    Weights that are stored as one tensor (gate and up) are several blocks, and each rank needs a part of each.
    """

    dim: int
    blocks: int = 1

    def part(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Returns the contiguous slice of a rank."""
        blocks = whole.chunk(self.blocks, self.dim)
        return torch.cat([block.chunk(ranks, self.dim)[rank] for block in blocks], self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins the slices of all ranks."""
        chunks = [part.chunk(self.blocks, self.dim) for part in parts]
        return torch.cat([chunk[block] for block in range(self.blocks) for chunk in chunks], self.dim)


WIDTH, TOKENS = Shard(-1), Shard(1)
"""Slices of an activation: of its width, and of its sequence."""


def shard_of(tensor: Tensor) -> Shard | None:
    """Returns how a parameter is sliced; None for whole parameters and for buffers."""
    shard: Shard | None = getattr(tensor, "tensor_shard", None)
    return shard


class _Exchange(torch.autograd.Function):
    """A collective whose backward pass is another collective."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forth: Forward, back: Forward) -> Tensor:
        ctx.back = back
        result: Tensor = forth(value)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _same(value: Tensor) -> Tensor:
    return value.view_as(value)


def _exchanged(value: Tensor, forth: Forward, back: Forward) -> Tensor:
    result: Tensor = _Exchange.apply(value, forth, back)  # type: ignore[no-untyped-call]
    return result


def copy(value: Tensor, ranks: Ranks) -> Tensor:
    """Passes a whole activation into split modules; the backward pass sums the ranks' partial gradients."""
    return _exchanged(value, _same, ranks.sum)


def reduce(value: Tensor, ranks: Ranks) -> Tensor:
    """Sums the partial results of all ranks into a whole activation."""
    return _exchanged(value, ranks.sum, _same)


def gather_slices(value: Tensor, ranks: Ranks) -> Tensor:
    """Joins slices of the last dimension into a whole activation."""
    return _exchanged(value, *_joining(WIDTH, ranks))


def scatter(value: Tensor, ranks: Ranks) -> Tensor:
    """Returns this rank's slice, along the last dimension, of a whole activation."""
    return _exchanged(value, *reversed(_joining(WIDTH, ranks)))


def join_tokens(value: Tensor, ranks: Ranks) -> Tensor:
    """Joins slices of a sequence into an activation whose gradient is whole on each rank."""
    return _exchanged(value, *_joining(TOKENS, ranks))


def part_of_tokens(value: Tensor, ranks: Ranks) -> Tensor:
    """Returns this rank's slice, along the sequence, of a whole activation."""
    return _exchanged(value, *reversed(_joining(TOKENS, ranks)))


def gather_tokens(value: Tensor, ranks: Ranks) -> Tensor:
    """Joins slices of a sequence for split modules; the backward pass sums the ranks' partial gradients of a slice."""
    return _exchanged(value, _joining(TOKENS, ranks)[0], _sum_of_tokens(ranks))


def reduce_tokens(value: Tensor, ranks: Ranks) -> Tensor:
    """Sums the partial results of all ranks, each for its slice of the sequence."""
    return _exchanged(value, _sum_of_tokens(ranks), _joining(TOKENS, ranks)[0])


def _joining(shard: Shard, ranks: Ranks) -> tuple[Forward, Forward]:
    """Returns how slices are joined, and how a rank's slice is taken."""
    return lambda value: shard.whole(ranks.gather(value)), lambda value: shard.part(value, ranks.rank, ranks.size)


def _sum_of_tokens(ranks: Ranks) -> Forward:
    return lambda value: ranks.sum_own(value.chunk(ranks.size, TOKENS.dim))


def share_gradient(value: Tensor, ranks: Ranks) -> Tensor:
    """Returns a whole value. Of its gradient, which is equal on all ranks, each passes on an equal share."""
    return _exchanged(value, _same, lambda gradient: gradient / ranks.size)


def sum_gradient(parameter: Tensor, ranks: Ranks) -> None:
    """Sums the gradients of a whole parameter that each rank uses only for its own heads, or its own tokens.

    A tensor hook runs on the gradient of one backward pass, before that gradient is accumulated.
    """
    if parameter.requires_grad and not is_summed(parameter):
        parameter.register_hook(ranks.sum)  # type: ignore[no-untyped-call]
        parameter.gradient_is_summed = True  # type: ignore[attr-defined]


def is_summed(parameter: Tensor) -> bool:
    """Whether a hook sums the gradients of a parameter over the ranks."""
    return hasattr(parameter, "gradient_is_summed")


class SplitSection:
    """The split modules of a rank between a whole activation and the next one, such as those of attention.

    Modules that are called one after the other with the same tensor share its entrance. Autograd adds up the gradients
    of all of them before it runs the backward pass of the entrance, so that they are summed over the ranks once. The
    sections of `regions.py` exchange slices instead.
    """

    def __init__(self, ranks: Ranks, one_module: bool = False) -> None:
        """one_module: whether the section is a single module, such as the head or a matrix of an adapter."""
        self.ranks = ranks
        self._one_module = one_module
        self._entered: tuple[Tensor, Tensor] | None = None

    def enter(self, value: Tensor) -> Tensor:
        """Passes a whole activation into a module; returns the same tensor for the same value."""
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value
        if self._one_module:
            return copy(value, self.ranks)
        if self._entered is None or self._entered[0] is not value:
            self._entered = value, copy(value, self.ranks)
        return self._entered[1]

    def admit(self, value: Tensor) -> Tensor:
        """Passes a whole activation into a module that is the only one to take it."""
        return copy(value, self.ranks)

    def leave(self, partial: Tensor) -> Tensor:
        """Sums the partial results of all ranks into a whole activation."""
        return reduce(partial, self.ranks)

    def close(self) -> None:
        """Releases what has entered; called when the last module of the section has its input."""
        self._entered = None

    def use(self, parameter: Tensor) -> None:
        """Prepares a whole parameter that is applied to what leaves the section."""
