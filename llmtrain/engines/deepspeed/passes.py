"""Runs the passes of a schedule on the stages of a rank, and exchanges their results with the other ranks of the pipe.

The schedule determines what a stage sends: hidden states to the rank of the next stage, their gradients to the rank
of the stage before. Token ids and positions are not sent, because all ranks of a pipe read the same micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from llmtrain.data import MicroBatch
from llmtrain.engines.deepspeed.delayed import Delayed, DelayedWeights
from llmtrain.engines.forward import varlen_arguments
from llmtrain.engines.optim import gradient_of
from llmtrain.models.documents import document_masks
from llmtrain.models.noise import noisy_embeddings
from llmtrain.models.stages import RankStages, Stage
from llmtrain.plan.schedules import KINDS, Pass, PassKind, PipelineSchedule

Tensors = tuple[Tensor, ...]


@dataclass
class _Saved:
    """What a stage saves of a micro-batch from its forward to its backward pass."""

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
        modules: list[Any] = list(stages)
        self._stages: dict[int, Stage] = dict(zip(schedule.stages_of(links.rank), modules, strict=True))
        self._links = links
        self._device = device
        self._computing = computing
        self._accumulating = accumulating
        self.delayed = DelayedWeights(stages) if schedule.splits_backward else None

    def train(self, batches: Sequence[MicroBatch], slices: Sequence[MicroBatch], loss: RunLastStage) -> None:
        """Runs forward and backward passes over micro-batches, and accumulates gradients.

        batches: whole micro-batches of this replica. slices: this rank's slices of them. loss: see `RunLastStage`.
        """
        self._run(KINDS, batches, slices, loss)

    def evaluate(self, batches: Sequence[MicroBatch], slices: Sequence[MicroBatch], loss: RunLastStage) -> None:
        """Runs forward passes only. Called without gradients."""
        self._run(("forward",), batches, slices, loss)

    def _run(
        self, kinds: Sequence[PassKind], batches: Sequence[MicroBatch], slices: Sequence[MicroBatch], loss: RunLastStage
    ) -> None:
        self._batches, self._slices, self._loss = batches, slices, loss
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._delayed_weights: dict[tuple[int, int], list[Delayed]] = {}
        self._links.begin(self.schedule, kinds, [batch_slice.input_ids.shape for batch_slice in slices])
        passes = [each for each in self.schedule.passes(len(batches))[self._links.rank] if each.kind in kinds]
        runs = {"forward": self._forward, "backward": self._backward, "weights": self._weights}
        for current, following in zip_longest(passes, passes[1:]):
            if following is not None and (needed := self._awaited(following)):
                self._links.expect(needed)  # while this pass runs
            runs[current.kind](current)
        self._links.finish()

    def _awaited(self, current: Pass) -> Pass | None:
        """Returns the pass whose result a pass waits for, if there is one."""
        is_last_stage = current.stage == self.schedule.stages - 1
        needs_no_message = current.kind == "weights" or (current.kind == "backward" and is_last_stage)
        return None if needs_no_message else self.schedule.needs(current)

    def _forward(self, current: Pass) -> None:
        stage = self._stages[current.stage]
        batch, batch_slice = self._batches[current.micro_batch], self._slices[current.micro_batch]
        tokens, positions = (
            part.to(self._device, non_blocking=True) for part in (batch_slice.input_ids, batch_slice.position_ids)
        )
        received: Tensors = ()
        inputs: Tensors = (tokens, positions)
        if (needed := self._awaited(current)) is not None:
            received = tuple(part.requires_grad_(torch.is_grad_enabled()) for part in self._links.take(needed))
            inputs = stage.inputs(received, tokens, positions)
        arguments = varlen_arguments(stage.model, batch, self._device)
        noise = noisy_embeddings(stage.model, batch) if stage.is_first else nullcontext()
        with document_masks(batch), noise, self._computing():
            if stage.is_last:
                results = self._loss(stage, inputs, arguments, batch_slice)
            else:
                results = _floating(stage(inputs, **arguments))
        if torch.is_grad_enabled():
            self._saved[current.stage, current.micro_batch] = _Saved(received, results)
        if not stage.is_last:
            self._links.give(current, tuple(part.detach() for part in results))

    def _backward(self, current: Pass) -> None:
        saved = self._saved.pop((current.stage, current.micro_batch))
        needed = self._awaited(current)
        gradients = [None] * len(saved.results) if needed is None else self._links.take(needed)
        with self._accumulating():
            torch.autograd.backward(saved.results, gradients)
        if self.delayed is not None:
            self._delayed_weights[current.stage, current.micro_batch] = self.delayed.take()
        if current.stage:
            self._links.give(current, tuple(gradient_of(part) for part in saved.received))

    def _weights(self, current: Pass) -> None:
        with self._accumulating():
            for accumulate in self._delayed_weights.pop((current.stage, current.micro_batch)):
                accumulate()


RunLastStage = Callable[[Stage, Tensors, dict[str, Any], MicroBatch], Tensors]
"""Runs the last stage and returns its loss; called with the stage, its inputs and arguments, and this rank's
micro-batch."""


def _floating(output: Tensor | Tensors) -> Tensors:
    assert isinstance(output, tuple)
    return tuple(part for part in output if part.is_floating_point())


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The types that a message describes by their indices."""
DESCRIPTION_LENGTH = 64
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
        rank = dist.get_rank()
        for pipe in pipes:
            up, down = dist.new_group(list(pipe)), dist.new_group(list(pipe))
            if rank in pipe:
                self._pipe, self._up, self._down = list(pipe), up, down
        self.rank = self._pipe.index(rank)
        self._shapes: dict[tuple[int, torch.Size], Shapes] = {}
        """The shapes of messages by the shape of the micro-batch. They are sent once, before the first message."""

    def begin(self, schedule: PipelineSchedule, kinds: Sequence[PassKind], sizes: Sequence[torch.Size]) -> None:
        """Starts passes of some kinds. sizes: the shapes of the micro-batches, [batch, T]."""
        self._schedule, self._sizes = schedule, sizes
        self._due = deque(
            message
            for message in schedule.messages(len(sizes))
            if message.kind in kinds and self.rank in (schedule.rank_of(message.stage), schedule.receiver(message))
        )
        """The messages of this rank in order."""
        self._receiving: dict[Pass, list[tuple[dist.Work, Tensor]]] = {}
        self._local_results: dict[Pass, Tensors] = {}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def finish(self) -> None:
        """Waits until all messages are sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def give(self, message: Pass, results: Tensors) -> None:
        """Sends the results of a pass of this rank to the rank that needs them, or keeps them if that is this rank."""
        receiver = self._schedule.receiver(message)
        assert receiver is not None
        if receiver == self.rank:
            self._local_results[message] = results
            return
        while self._due[0] != message:
            self._receive()
        self._due.popleft()
        key = self._described_as(message)
        if key not in self._shapes:
            self._shapes[key] = [(part.shape, part.dtype) for part in results]
            self._send(_description(results).to(self._device), receiver)
        for part in results:
            self._send(part.contiguous(), receiver)

    def expect(self, message: Pass) -> None:
        """Begins to receive the results of a pass, unless this rank has to send something first."""
        if self._is_ours(message):
            return
        while message not in self._receiving and not self._is_ours(self._due[0]):
            if self._described_as(self._due[0]) not in self._shapes:
                return  # Its sizes are not known yet, and waiting for them would block.
            self._receive()

    def take(self, message: Pass) -> Tensors:
        """Returns the results of a pass."""
        if self._is_ours(message):
            return self._local_results.pop(message)
        while message not in self._receiving:
            self._receive()
        receiving = self._receiving.pop(message)
        for work, _ in receiving:
            work.wait()
        return tuple(part for _, part in receiving)

    def _is_ours(self, message: Pass) -> bool:
        return self._schedule.rank_of(message.stage) == self.rank

    def _described_as(self, message: Pass) -> tuple[int, torch.Size]:
        """Returns the key of a message's shapes; a gradient has the shapes that the stage before has sent."""
        return message.stage - (message.kind == "backward"), self._sizes[message.micro_batch]

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
        message = self._due.popleft()
        sender, key = self._schedule.rank_of(message.stage), self._described_as(message)
        assert sender != self.rank, f"{message} has to be sent first"
        if key not in self._shapes:
            description = torch.empty(DESCRIPTION_LENGTH, dtype=torch.int64, device=self._device)
            self._start_receiving(description, sender).wait()
            self._shapes[key] = _shapes(description)
        parts = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._shapes[key]]
        self._receiving[message] = [(self._start_receiving(part, sender), part) for part in parts]

    def _start_receiving(self, part: Tensor, sender: int) -> dist.Work:
        work = dist.irecv(part, self._pipe[sender], group=self._up if sender < self.rank else self._down)
        assert work is not None
        return work


def _description(parts: Tensors) -> Tensor:
    numbers = [len(parts)]
    for part in parts:
        numbers += [DTYPES.index(part.dtype), part.dim(), *part.shape]
    return torch.tensor(numbers + [0] * (DESCRIPTION_LENGTH - len(numbers)))


def _shapes(description: Tensor) -> Shapes:
    numbers = iter(description.tolist())
    shapes = []
    for _ in range(next(numbers)):
        dtype, dimensions = DTYPES[next(numbers)], next(numbers)
        shapes.append((torch.Size(next(numbers) for _ in range(dimensions)), dtype))
    return shapes
