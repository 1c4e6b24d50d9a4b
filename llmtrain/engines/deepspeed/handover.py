"""States of recurrences pass from rank to rank, with the slices of a sequence; their gradients pass back.

Ranks only exchange states where a document reaches from one slice into the next, which all of them know. A message is
sent without waiting, so it does not matter which rank comes first. The autograd engine executes operations in the
reverse of their order, so gradients pass in the reverse order of the states on both ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.engines.deepspeed.ring import Group
from llmtrain.models.states import Layout, States


class Neighbors:
    """The ranks with the slices before and after that of this rank, in a group that shares sequences."""

    def __init__(self, group: Group, rank: int) -> None:
        """rank: this rank's number in the group."""
        self.group = group
        self._rank = rank
        self._layouts: WeakKeyDictionary[nn.Module, dict[int, Layout]] = WeakKeyDictionary()
        """For each part, the states that it exchanges with the rank before (-1) and after (1)."""
        self._sent: list[tuple[object, Any, Tensor]] = []
        """Messages that may be on their way: by whom, its work, and what must live until then."""

    def begin(self, part: nn.Module, hidden: Tensor) -> RankHandover:
        """Begins to exchange the states of a part, which gets these hidden states."""
        return RankHandover(self, part, hidden)

    def send(self, sender: object, step: int, tensors: Sequence[Tensor]) -> None:
        """Sends tensors to an adjacent rank; those that another sender has sent before have arrived."""
        for _, work, _ in [message for message in self._sent if message[0] is not sender]:
            work.wait()
        self._sent = [message for message in self._sent if message[0] is sender]
        for tensor in tensors:
            tensor = tensor.contiguous()
            self._sent.append((sender, dist.isend(tensor, self._number(step), self.group), tensor))

    def receive(self, step: int, layout: Layout, device: torch.device) -> tuple[Tensor, ...]:
        """Waits for tensors with this layout from an adjacent rank."""
        tensors = tuple(torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in layout)
        for tensor in tensors:
            dist.recv(tensor, self._number(step), self.group)
        return tensors

    def announce(self, part: nn.Module, layout: Layout, device: torch.device) -> None:
        """Tells the next rank once what a part sends. Raises RuntimeError if that has changed."""
        known = self._layouts.setdefault(part, {})
        if 1 not in known:
            dist.send_object_list([layout], self._number(1), self.group, device)
            known[1] = layout
        if known[1] != layout:
            raise RuntimeError(f"states of {type(part).__name__} change from {known[1]} to {layout}")

    def layout(self, part: nn.Module, device: torch.device) -> Layout:
        """Returns what the rank before sends for a part, which it has announced once."""
        known = self._layouts.setdefault(part, {})
        if -1 not in known:
            announced: list[Any] = [None]
            dist.recv_object_list(announced, self._number(-1), self.group, device)
            known[-1] = announced[0]
        return known[-1]

    def _number(self, step: int) -> int:
        return dist.get_global_rank(self.group, self._rank + step)


class RankHandover:
    """The exchange of states during one call of a part (`llmtrain.models.states.Handover`), and of their gradients."""

    def __init__(self, neighbors: Neighbors, part: nn.Module, hidden: Tensor) -> None:
        self.neighbors, self._part, self._device = neighbors, part, hidden.device
        # Both ranks must agree whether gradients pass, whatever the states of one of them depend on.
        trained = hidden.requires_grad or any(parameter.requires_grad for parameter in part.parameters())
        self._anchor = torch.empty(0, device=hidden.device, requires_grad=trained and torch.is_grad_enabled())

    def receive(self) -> States:
        """Returns the states of the next row whose document continues from the slice before."""
        layout = self.neighbors.layout(self._part, self._device)
        return States.of(layout, _Receive.apply(self._anchor, self, layout))  # type: ignore[no-untyped-call]

    def send(self, output: Tensor, states: States) -> Tensor:
        """Sends the states of the next row whose document continues in the slice after."""
        self.neighbors.announce(self._part, states.layout, self._device)
        sent: Tensor = _Send.apply(self._anchor, self, states.layout, output, *states.tensors)  # type: ignore[no-untyped-call]
        return sent


class _Receive(torch.autograd.Function):
    """Receives states from the rank before, and returns their gradients to it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, handover: RankHandover, layout: Layout) -> tuple[Tensor, ...]:
        ctx.handover = handover
        return handover.neighbors.receive(-1, layout, anchor.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.handover.neighbors.send(ctx.handover, -1, gradients)
        return None, None, None


class _Send(torch.autograd.Function):
    """Sends states to the next rank, and waits for their gradients before the backward pass of the output."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, handover: RankHandover, layout: Layout, output: Tensor, *states: Tensor
    ) -> Tensor:
        handover.neighbors.send(handover, 1, states)
        ctx.handover, ctx.layout, ctx.device = handover, layout, anchor.device
        # A recomputation ends with the last tensor that is saved, and begins when one is read.
        ctx.save_for_backward(anchor)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.saved_tensors
        of_states = ctx.handover.neighbors.receive(1, ctx.layout, ctx.device)
        return None, None, None, gradient, *of_states
