"""The interface between the training loop and the engines.

Its unit is a whole optimizer step, because a pipeline offers no smaller one: it interleaves the forward and backward
passes of several micro-batches. `train_step` of each engine reads as accumulate, norm, guard, update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines.state.save_load import HasState
from llmtrain.errors import Problem, RecipeError
from llmtrain.models import Objective, OwnLoss, OwnMetrics

ChangeGradients = Callable[[Mapping[str, Tensor]], None]
"""Changes whole gradients in place, which are given by the Hugging Face names of their weights."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step. Its tensors are still on the device, so that a loop waits for it only when it logs."""

    loss: Tensor
    """Mean over the items of the global batch, in nats; a scalar, equal on all ranks."""
    grad_norm: Tensor
    """2-norm of the whole gradient before clipping; a scalar, equal on all ranks."""
    lr: float
    """Learning rate of the step."""
    router_loss: Tensor | None = None
    """[sum of coefficient × router loss, number of micro-batches], over this rank's micro-batches; None if the model
    has no router loss. `loss` does not contain it."""


@dataclass(frozen=True)
class Accumulated:
    """What the passes of a step return besides the gradients, which they accumulate."""

    loss: Tensor
    """This rank's part of the mean loss over the items of the global batch; a scalar."""
    router_loss: Tensor | None
    """As in `StepResult`."""


class Passes:
    """The forward and backward passes of a step over this rank's micro-batches, as far as they have run."""

    def __init__(self, batch: StepBatch, device: torch.device) -> None:
        self.divisor = batch.divisor
        self.number = len(batch.micro_batches)
        self.done = 0
        self._loss_sum = torch.zeros((), device=device)
        self._router_loss: Tensor | None = None

    @property
    def at_last(self) -> bool:
        """Whether the next pass is the last one."""
        return self.done == self.number - 1

    def add(self, loss_sum: Tensor, auxiliary: Tensor | None) -> None:
        """Adds the losses of a micro-batch, after its backward pass."""
        self.done += 1
        self._loss_sum += loss_sum.detach()
        if auxiliary is not None:
            self._router_loss = with_router_loss(self._router_loss, auxiliary)

    def accumulated(self) -> Accumulated:
        """Returns the results of all passes."""
        return Accumulated(self._loss_sum / self.divisor, self._router_loss)


class OwnPasses(Passes):
    """The passes of a step in a loop of the user's own, which iterates over the micro-batches."""

    result: StepResult
    """Set after the update."""

    def __init__(
        self,
        batch: StepBatch,
        device: torch.device,
        model: Callable[[MicroBatch, MicroBatch], Any],
        backward: Callable[[Passes, Tensor, Tensor | None], object],
        slice: Callable[[MicroBatch], MicroBatch] = lambda micro_batch: micro_batch,
        synchronizing: Callable[[bool], AbstractContextManager[object]] = lambda is_last: nullcontext(),
    ) -> None:
        """model: runs the model on this rank's slice of a micro-batch; also given the whole one. backward: accumulates
        the gradients of the losses of a micro-batch. slice: returns this rank's slice. synchronizing: returns the
        context of a micro-batch's passes, given whether it is the last one.
        """
        super().__init__(batch, device)
        self._batch, self._device = batch, device
        self._model, self._backward, self._slice, self._synchronizing = model, backward, slice, synchronizing

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yields this rank's slice of each micro-batch, on the device.

        Raises RecipeError unless each has one backward pass.
        """
        for number, whole in enumerate(self._batch.micro_batches, start=1):
            self._whole = whole
            self._auxiliary: Tensor | None = None
            with self._synchronizing(self.at_last):
                yield self._slice(whole).to(self._device)
            if self.done != number:
                self._refuse(f"was called {self.done} times for the first {number} micro-batches of a step")

    def model(self, micro_batch: MicroBatch) -> Any:
        """Returns the model's output for the current micro-batch, with document masks and in the plan's precision."""
        output, auxiliary = self._model(micro_batch, self._whole)
        if auxiliary is not None:
            self._auxiliary = auxiliary if self._auxiliary is None else self._auxiliary + auxiliary
        return output

    def backward(self, loss_sum: Tensor) -> Tensor:
        """Accumulates the gradients of a micro-batch; returns its part of this rank's loss.

        loss_sum: a scalar, the sum over the items of the micro-batch.
        """
        self._backward(self, loss_sum, self._auxiliary)
        return loss_sum.detach() / self.divisor

    def accumulated(self) -> Accumulated:
        """Returns the results of all passes. Raises RecipeError if some have not run."""
        if self.done != self.number:
            self._refuse(f"was called {self.done} times in a step of {self.number} micro-batches")
        return super().accumulated()

    def _refuse(self, message: str) -> None:
        fix = "call it once for each of the micro-batches that `accumulate` yields"
        raise RecipeError(Problem("loop.backward", "engine.backward", message, fix))


class Engine(HasState, Protocol):
    """Runs the optimizer steps of a plan. All ranks call every method together."""

    device: torch.device

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's replica, which determines the samples that the rank reads."""

    @property
    def model(self) -> nn.Module:
        """The model, or this rank's part of it."""

    def train_step(self, batch: StepBatch, change_gradients: ChangeGradients | None = None) -> StepResult:
        """Runs forward and backward passes over this rank's micro-batches, and one update if the guard allows it.

        change_gradients: called once the gradients are complete, before their norm is taken; only under plans that the
        rule `own.gradients` allows.
        """

    def own_passes(
        self, batch: StepBatch, change_gradients: ChangeGradients | None = None
    ) -> AbstractContextManager[OwnPasses]:
        """Returns a context for the passes of a step that a loop of the user's own makes; at its end, the weights are
        updated. change_gradients: as for `train_step`. Raises RecipeError if the plan's passes cannot be made from
        outside.
        """

    def averaged(self) -> AbstractContextManager[None]:
        """Returns a context in which the model has averaged weights, if the optimizer averages (schedule-free AdamW).

        `eval_step` and `named_weights` enter it by themselves; around several calls, it swaps weights only once.
        """

    def eval_step(self, batch: StepBatch) -> Tensor:
        """Returns the mean loss over the items of the global batch, without gradients; a scalar."""

    def next_logits(self, batch: MicroBatch) -> dict[int, Tensor]:
        """Returns the logits of the next token by row of the batch, each [vocab] in fp32.

        A row has one label, at the last token of its text. Every rank gets the same batch, and returns the rows whose
        logits it computes. Each row is returned by at least one rank.
        """

    def metric_sums(self) -> Tensor | None:
        """Returns sums over the batch that was trained or evaluated last, of all ranks: [sums].

        The `metrics` of the objective read them. None without an objective.
        """

    objective: Objective | OwnLoss | None
    """The objective, unless the loss is the cross-entropy of each token."""

    own_metrics: OwnMetrics | None
    """The user's own metrics of evaluations, if there are any."""

    def own_metric_sums(self) -> Tensor:
        """Returns the sums of `own_metrics` over the batch that was evaluated last, of all ranks: [sums]."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every weight, whole and on the CPU, under its Hugging Face name; tied weights once."""

    def close(self) -> None:
        """Removes references that would keep the engine in memory after its last use."""

    def describe(self) -> dict[str, Any]:
        """Returns the settings with which the engine actually runs, for the run's record."""


def with_router_loss(total: Tensor | None, auxiliary: Tensor) -> Tensor:
    """Returns `StepResult.router_loss` with that of one more micro-batch."""
    of_micro_batch = torch.stack([auxiliary.detach().float().reshape(()), torch.ones((), device=auxiliary.device)])
    return of_micro_batch if total is None else total + of_micro_batch
