"""One optimizer step: accumulate, norm, verdict, update."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines.engine import StepResult
from llmtrain.engines.guard import Guard, Measured


class Passes(Protocol):
    """The parts of a step that `take_step` leaves to an engine. All ranks call every method."""

    device: torch.device

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""

    def start(self) -> None:
        """Puts the model in training mode, and clears the gradients."""

    def passing(self, is_last: bool) -> AbstractContextManager[object]:
        """Returns the context of a micro-batch's passes; only the last micro-batch has to synchronize gradients."""

    def forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Returns the sum of the losses, and the auxiliary loss to be averaged over micro-batches."""

    def weigh(self, loss_sum: Tensor, terms: int) -> Tensor:
        """Returns the loss whose gradients, reduced over ranks, are those of the mean over all terms."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Accumulates the gradients of a micro-batch."""

    def finish(self, loss: Tensor) -> Measured:
        """Takes the norm of the gradients, the guard's verdict and, if that allows it, the update.

        loss: this rank's share of the mean over all terms.
        """


def take_step(engine: Passes, batch: StepBatch) -> StepResult:
    """Takes one update from the mean over all terms of the global batch: its target tokens, or its examples."""
    lr = engine.learning_rate
    engine.start()
    total = torch.zeros((), device=engine.device)
    for index, micro_batch in enumerate(batch.micro_batches, start=1):
        is_last = index == len(batch.micro_batches)
        with engine.passing(is_last):
            loss_sum, auxiliary = engine.forward(micro_batch)
            loss = engine.weigh(loss_sum, batch.terms)
            if auxiliary is not None:
                loss = loss + auxiliary / len(batch.micro_batches)
            engine.backward(loss, is_last)
        total += loss_sum.detach()
    measured = engine.finish(total / batch.terms)
    return StepResult(loss=measured.loss, grad_norm=measured.grad_norm, lr=lr)


class Update(Protocol):
    """The end of a step, for an engine whose update is called explicitly."""

    guard: Guard

    def clip(self) -> Tensor:
        """Reduces the gradients over ranks, if still necessary, and clips them; returns their norm before clipping."""

    def measure(self, loss: Tensor, grad_norm: Tensor) -> Measured:
        """Combines the loss and the norm of all ranks; `loss` is this rank's share."""

    def update(self) -> None:
        """Steps the optimizer and the schedule."""


def finish(engine: Update, loss: Tensor) -> Measured:
    """Implements `Passes.finish` for such an engine."""
    measured = engine.measure(loss, engine.clip())
    engine.guard.judge(measured)
    engine.update()
    return measured
