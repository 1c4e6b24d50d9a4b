"""A plain PyTorch loop, which Horovod and nn.DataParallel distribute over devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines.engine import StepResult
from llmtrain.engines.forward import forward
from llmtrain.engines.guard import Guard, Measured
from llmtrain.engines.optim import gradients_of, parameter_groups, schedule, torch_optimizer
from llmtrain.engines.state.held import held
from llmtrain.engines.state.pieces import Piece, Region
from llmtrain.engines.state.save_load import (
    Place,
    load_state,
    pieces_of,
    save_state,
    untrained_pieces,
)
from llmtrain.engines.state.writer import Writer
from llmtrain.engines.step import finish, take_step
from llmtrain.models.precision import autocast
from llmtrain.overrides.torch import resume_schedule, squared_norm
from llmtrain.recipe import Recipe


class PlainLoop:
    """A loop over micro-batches, gradient clipping and `optimizer.step()`.

    An fp32 model is trained as it is, or under autocast. For a model in a lower precision, the loop keeps fp32 master
    weights, as mixed precision training does (arXiv 1710.03740). They start from the rounded weights and accumulate the
    gradients of each micro-batch in fp32. After each step they are rounded into the model's weights.
    """

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self.device = next(model.parameters()).device
        groups = parameter_groups(model, recipe.optim.weight_decay)
        self.masters = {
            weight: nn.Parameter(weight.detach().float())
            for weight in model.parameters()
            if weight.requires_grad and weight.dtype != torch.float32
        }
        for group in groups:
            group["params"] = [self.masters.get(weight, weight) for weight in group["params"]]
        self.trained: list[nn.Parameter] = [weight for group in groups for weight in group["params"]]
        self.optimizer = self._optimizer(groups)
        self.scheduler = schedule(self.optimizer, recipe)
        self.guard = Guard(recipe.guard, self.device)
        self.guard.watch(self.optimizer)

    @property
    def data_parallel_rank(self) -> int:
        """0, because there is a single rank."""
        return 0

    def train_step(self, batch: StepBatch) -> StepResult:
        """Takes one update from the sum over all micro-batches, divided by the target tokens."""
        return take_step(self, batch)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        rate: float = self.optimizer.param_groups[0]["lr"]
        return rate

    def start(self) -> None:
        """Puts the model in training mode, and clears the gradients."""
        self.model.train()
        self.optimizer.zero_grad()

    def passing(self, is_last: bool) -> AbstractContextManager[object]:
        """Returns the context of a micro-batch's passes, which is empty; gradients are reduced after the last one."""
        return nullcontext()

    def weigh(self, loss_sum: Tensor, target_tokens: int) -> Tensor:
        """Divides by the target tokens of the global batch only, because gradients are summed over ranks."""
        return loss_sum / target_tokens

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Accumulates the gradients of a micro-batch."""
        loss.backward()  # type: ignore[no-untyped-call]
        self._collect_gradients()

    def finish(self, loss: Tensor) -> Measured:
        """Takes the norm and the verdict, and updates the weights."""
        return finish(self, loss)

    def clip(self) -> Tensor:
        """Reduces the gradients over ranks and clips them; returns their norm before clipping."""
        self._reduce_gradients()
        grad_norm = squared_norm(gradients_of(self.trained), self.device).sqrt().float()
        nn.utils.clip_grads_with_norm_(self.trained, self.recipe.optim.clip_grad_norm or float("inf"), grad_norm)
        return grad_norm

    def update(self) -> None:
        """Steps the optimizer and the schedule."""
        self._update()
        self._round_masters()
        self.scheduler.step()

    def forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Returns the sum of the cross-entropies, and the auxiliary loss to be averaged over micro-batches."""
        with autocast(self.recipe.parallel.precision, self.device.type):
            return self._forward(micro_batch)

    @torch.no_grad()
    def eval_step(self, batch: StepBatch) -> Tensor:
        """Returns the mean cross-entropy over the target tokens."""
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for micro_batch in batch.micro_batches:
            total += self.forward(micro_batch)[0]
        return self._over_ranks(total) / batch.target_tokens

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every weight under its Hugging Face name; tied weights once."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().cpu()

    def save(self, writer: Writer) -> None:
        """Writes this rank's share of the pieces."""
        save_state(self, writer)

    def load(self, folder: Path) -> None:
        """Loads a checkpoint, which any engine may have written."""
        load_state(self, folder)

    def pieces(self) -> Iterator[list[Piece]]:
        """Yields live pieces of all trained tensors, then of the untrained ones."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}

        def place(parameter: nn.Parameter) -> Place:
            return names[parameter], Region.whole(parameter.shape), self._copy

        yield from pieces_of(held(self.optimizer, self.masters), place)
        yield untrained_pieces(self.model, self._copy)

    def progress(self) -> dict[str, Any]:
        """Returns the position of the schedule."""
        return {"schedule": self.scheduler.last_epoch}

    def resumed(self, progress: dict[str, Any]) -> None:
        """Restores the model's weights and the schedule after the pieces have been loaded."""
        self._round_masters()
        resume_schedule(self.scheduler, progress["schedule"])

    def describe(self) -> dict[str, Any]:
        """Returns the optimizer's class and the device."""
        return {"engine": "plain PyTorch", "optimizer": type(self.optimizer).__name__, "device": str(self.device)}

    # The engines for Horovod and nn.DataParallel override the following methods.

    def _optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Returns the optimizer of `trained`."""
        return torch_optimizer(groups, self.recipe.optim)

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Does what `forward` does, within its autocast context."""
        return forward(self.model, self.model, micro_batch, self.device)

    def _reduce_gradients(self) -> None:
        """Reduces the gradients to those of the global batch; does nothing here, with a single rank."""

    def _update(self) -> None:
        self.optimizer.step()

    def measure(self, loss: Tensor, grad_norm: Tensor) -> Measured:
        """Combines this rank's share of the loss, and the norm of the reduced gradients, over all ranks."""
        return Measured(loss, grad_norm)

    def _over_ranks(self, total: Tensor) -> Tensor:
        """Returns the sum of a scalar over all ranks."""
        return total

    def _collect_gradients(self) -> None:
        """Adds the gradients of a micro-batch to those of the master weights, in fp32."""
        for weight, master in self.masters.items():
            if weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                weight.grad = None

    @torch.no_grad()
    def _round_masters(self) -> None:
        for weight, master in self.masters.items():
            weight.copy_(master)

    @property
    def _copy(self) -> tuple[int, int]:
        """(index, number) of this rank among the ranks with the same weights."""
        return 0, 1
