"""Runs the passes of a schedule on the stages of a rank, and exchanges their results with the other ranks of the pipe.

The schedule determines what a stage sends: hidden states to the rank of the next stage, their gradients to the rank
of the stage before. Token ids and positions are not sent, because all ranks of a pipe read the same micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from llmtrain.data import MicroBatch
from llmtrain.engines.deepspeed.delayed import Delayed, DelayedWeights
from llmtrain.engines.forward import bounds_for, documents_known
from llmtrain.engines.optim import gradient_of
from llmtrain.models.stages import RankStages, Stage
from llmtrain.plan.schedules import KINDS, Pass, PassKind, PipelineSchedule

Tensors = tuple[Tensor, ...]


@dataclass
class _Running:
    """The data that a stage keeps of a micro-batch from its forward to its backward pass."""

    received: Tensors
    """Leaf tensors; the previous stage waits for their gradients."""
    results: Tensors
    """The tensors that were sent, or the loss."""


class PassRunner:
    """The passes of one rank. All ranks of the pipe call `train` and `evaluate` at the same time."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        stages: RankStages,
        links: PipeLinks,
        device: torch.device,
        computing: Callable[[], AbstractContextManager[object]],
        accumulating: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """computing: the context of forward passes. accumulating: the context of backward passes; when it ends, it adds
        their gradients to those of the step."""
        self.schedule = schedule
        held: list[Any] = list(stages)
        self._stages: dict[int, Stage] = dict(zip(schedule.stages_of(links.rank), held, strict=True))
        self._links = links
        self._device = device
        self._computing = computing
        self._accumulating = accumulating
        self.delayed = DelayedWeights(stages) if schedule.splits_backward else None

    def train(self, batches: Sequence[MicroBatch], own: Sequence[MicroBatch], loss: Loss) -> None:
        """Runs forward and backward passes over micro-batches, and accumulates gradients.

        batches: whole micro-batches of this replica; own: this rank's slices of them. loss: see `Loss`.
        """
        self._run(KINDS, batches, own, loss)

    def evaluate(self, batches: Sequence[MicroBatch], own: Sequence[MicroBatch], loss: Loss) -> None:
        """Runs forward passes only. Called without gradients."""
        self._run(("forward",), batches, own, loss)

    def _run(
        self, kinds: Sequence[PassKind], batches: Sequence[MicroBatch], own: Sequence[MicroBatch], loss: Loss
    ) -> None:
        self._batches, self._own, self._loss = batches, own, loss
        self._running: dict[tuple[int, int], _Running] = {}
        self._waiting: dict[tuple[int, int], list[Delayed]] = {}
        self._links.begin(self.schedule, kinds, [one.input_ids.shape for one in own])
        passes = [one for one in self.schedule.passes(len(batches))[self._links.rank] if one.kind in kinds]
        runs = {"forward": self._forward, "backward": self._backward, "weights": self._weights}
        for one, following in zip_longest(passes, passes[1:]):
            if following is not None and (needed := self._received(following)):
                self._links.expect(needed)  # while this pass runs
            runs[one.kind](one)
        self._links.finish()

    def _received(self, one: Pass) -> Pass | None:
        """Returns the pass whose results a pass receives, if there is one."""
        is_end = one.kind == "weights" or (one.kind == "backward" and one.stage == self.schedule.stages - 1)
        return None if is_end else self.schedule.needs(one)

    def _forward(self, one: Pass) -> None:
        stage, batch, own = self._stages[one.stage], self._batches[one.micro_batch], self._own[one.micro_batch]
        tokens, positions = (part.to(self._device, non_blocking=True) for part in (own.input_ids, own.position_ids))
        received: Tensors = ()
        inputs: Tensors = (tokens, positions)
        if (needed := self._received(one)) is not None:
            received = tuple(part.requires_grad_(torch.is_grad_enabled()) for part in self._links.take(needed))
            inputs = stage.inputs(received, tokens, positions)
        stage.context, stage.bounds = documents_known(batch), bounds_for(stage.model, batch, self._device)
        with self._computing():
            results = self._loss(stage, inputs, own) if stage.is_last else _floating(stage(inputs))
        if torch.is_grad_enabled():
            self._running[one.stage, one.micro_batch] = _Running(received, results)
        if not stage.is_last:
            self._links.give(one, tuple(part.detach() for part in results))

    def _backward(self, one: Pass) -> None:
        running = self._running.pop((one.stage, one.micro_batch))
        needed = self._received(one)
        gradients = [None] * len(running.results) if needed is None else self._links.take(needed)
        with self._accumulating():
            torch.autograd.backward(running.results, gradients)
        if self.delayed is not None:
            self._waiting[one.stage, one.micro_batch] = self.delayed.take()
        if one.stage:
            self._links.give(one, tuple(gradient_of(part) for part in running.received))

    def _weights(self, one: Pass) -> None:
        with self._accumulating():
            for accumulate in self._waiting.pop((one.stage, one.micro_batch)):
                accumulate()


Loss = Callable[[Stage, Tensors, MicroBatch], Tensors]
"""Runs the last stage and returns its loss; called with the stage, its inputs and this rank's micro-batch."""


def _floating(output: Tensor | Tensors) -> Tensors:
    assert isinstance(output, tuple)
    return tuple(part for part in output if part.is_floating_point())


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DESCRIPTION = 64
"""Length of a message that describes tensors: their number, and the type, the dimensions and the sizes of each."""
Shapes = list[tuple[torch.Size, torch.dtype]]


class PipeLinks:
    """Messages between the ranks of a pipe, each named after the pass whose result it is.

    Each direction has communicators of its own: on a GPU, a message that is not received yet would block what is sent
    the other way. NCCL can deadlock unless all ranks launch the operations of several communicators in one order
    ("Using multiple NCCL communicators concurrently" in its guide). All ranks therefore follow the schedule's
    `messages`.
    """

    def __init__(self, pipes: Sequence[Sequence[int]], device: torch.device) -> None:
        """pipes: the global ranks of every pipe of the run. All ranks of the run make their links at the same time."""
        self._device = device
        own = dist.get_rank()
        for pipe in pipes:
            up, down = dist.new_group(list(pipe)), dist.new_group(list(pipe))
            if own in pipe:
                self._pipe, self._up, self._down = list(pipe), up, down
        self.rank = self._pipe.index(own)
        self._shapes: dict[tuple[int, torch.Size], Shapes] = {}
        """The shapes of messages by the shape of the micro-batch. They are sent once, before the first message."""

    def begin(self, schedule: PipelineSchedule, kinds: Sequence[PassKind], sizes: Sequence[torch.Size]) -> None:
        """Starts passes of some kinds. sizes: the shapes of the micro-batches, [batch, T]."""
        self._schedule, self._sizes = schedule, sizes
        self._due = deque(
            one
            for one in schedule.messages(len(sizes))
            if one.kind in kinds and self.rank in (schedule.rank_of(one.stage), schedule.receiver(one))
        )
        """The messages of this rank in order."""
        self._coming: dict[Pass, list[tuple[dist.Work, Tensor]]] = {}
        self._here: dict[Pass, Tensors] = {}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def finish(self) -> None:
        """Waits until all messages are sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def give(self, one: Pass, results: Tensors) -> None:
        """Passes on the results of a pass of this rank."""
        receiver = self._schedule.receiver(one)
        assert receiver is not None
        if receiver == self.rank:
            self._here[one] = results
            return
        while self._due[0] != one:
            self._receive()
        self._due.popleft()
        key = self._described_as(one)
        if key not in self._shapes:
            self._shapes[key] = [(part.shape, part.dtype) for part in results]
            self._send(_description(results).to(self._device), receiver)
        for part in results:
            self._send(part.contiguous(), receiver)

    def expect(self, one: Pass) -> None:
        """Begins to receive the results of a pass, unless this rank has to send something first."""
        if self._is_own(one):
            return
        while one not in self._coming and not self._is_own(self._due[0]):
            if self._described_as(self._due[0]) not in self._shapes:
                return  # Its sizes are not known yet, and waiting for them would block.
            self._receive()

    def take(self, one: Pass) -> Tensors:
        """Returns the results of a pass."""
        if self._is_own(one):
            return self._here.pop(one)
        while one not in self._coming:
            self._receive()
        coming = self._coming.pop(one)
        for work, _ in coming:
            work.wait()
        return tuple(part for _, part in coming)

    def _is_own(self, one: Pass) -> bool:
        return self._schedule.rank_of(one.stage) == self.rank

    def _described_as(self, one: Pass) -> tuple[int, torch.Size]:
        """Returns the key of a message's shapes; a gradient has the shapes that the stage before has sent."""
        return one.stage - (one.kind == "backward"), self._sizes[one.micro_batch]

    def _send(self, part: Tensor, receiver: int) -> None:
        while self._sending and self._sending[0][0].is_completed():
            # Only after this does the allocator know that the memory of the message may be used again.
            self._sending.popleft()[0].wait()
        group = self._up if receiver > self.rank else self._down
        work = dist.isend(part, self._pipe[receiver], group=group)
        assert work is not None
        self._sending.append((work, part))

    def _receive(self) -> None:
        """Begins to receive the next message."""
        one = self._due.popleft()
        sender, key = self._schedule.rank_of(one.stage), self._described_as(one)
        assert sender != self.rank, f"{one} has to be sent first"
        if key not in self._shapes:
            description = torch.empty(DESCRIPTION, dtype=torch.int64, device=self._device)
            self._begin(description, sender).wait()
            self._shapes[key] = _shapes(description)
        parts = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._shapes[key]]
        self._coming[one] = [(self._begin(part, sender), part) for part in parts]

    def _begin(self, part: Tensor, sender: int) -> dist.Work:
        work = dist.irecv(part, self._pipe[sender], group=self._up if sender < self.rank else self._down)
        assert work is not None
        return work


def _description(parts: Tensors) -> Tensor:
    numbers = [len(parts)]
    for part in parts:
        numbers += [DTYPES.index(part.dtype), part.dim(), *part.shape]
    return torch.tensor(numbers + [0] * (DESCRIPTION - len(numbers)))


def _shapes(description: Tensor) -> Shapes:
    numbers = iter(description.tolist())
    found = []
    for _ in range(next(numbers)):
        dtype, dimensions = DTYPES[next(numbers)], next(numbers)
        found.append((torch.Size(next(numbers) for _ in range(dimensions)), dtype))
    return found
