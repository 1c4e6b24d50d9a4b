"""One optimizer step: accumulate, norm, verdict, update."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines.guard import Guard, Measured
from llmtrain.engines.seam import StepResult


class Passes(Protocol):
    """What an engine does where `take_step` leaves it to the engine. Every method is called by all ranks."""

    device: torch.device

    @property
    def learning_rate(self) -> float:
        """Of the step to come."""

    def start(self) -> None:
        """Sets the training mode; there are no gradients afterwards."""

    def passing(self, is_last: bool) -> AbstractContextManager[object]:
        """The context of a micro-batch: gradients need to reach the other ranks with the last one only."""

    def forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Sum of the cross-entropies, and the auxiliary loss as it counts in a mean over micro-batches."""

    def weigh(self, loss_sum: Tensor, target_tokens: int) -> Tensor:
        """The loss whose gradients, reduced over ranks, are those of the mean over the target tokens."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds the gradients of a micro-batch."""

    def finish(self, loss: Tensor) -> Measured:
        """Takes the norm of the gradients, the guard's verdict and, if that allows it, the update.

        loss: this rank's share of the mean over the target tokens.
        """


def take_step(engine: Passes, batch: StepBatch) -> StepResult:
    """One update from the mean over all target tokens of the global batch."""
    lr = engine.learning_rate
    engine.start()
    total = torch.zeros((), device=engine.device)
    for index, micro_batch in enumerate(batch.micro_batches, start=1):
        is_last = index == len(batch.micro_batches)
        with engine.passing(is_last):
            loss_sum, auxiliary = engine.forward(micro_batch)
            loss = engine.weigh(loss_sum, batch.target_tokens)
            if auxiliary is not None:
                loss = loss + auxiliary / len(batch.micro_batches)
            engine.backward(loss, is_last)
        total += loss_sum.detach()
    measured = engine.finish(total / batch.target_tokens)
    return StepResult(loss=measured.loss, grad_norm=measured.grad_norm, lr=lr)


class Update(Protocol):
    """The end of a step, of an engine that updates when it is told to."""

    guard: Guard

    def clip(self) -> Tensor:
        """Reduces the gradients over ranks where that has not been done, and clips them; returns their norm before."""

    def measure(self, loss: Tensor, grad_norm: Tensor) -> Measured:
        """Of all ranks, from this one's share of the loss."""

    def update(self) -> None:
        """Has optimizer and schedule take the step."""


def finish(engine: Update, loss: Tensor) -> Measured:
    """`Passes.finish` of such an engine."""
    measured = engine.measure(loss, engine.clip())
    engine.guard.judge(measured)
    engine.update()
    return measured
