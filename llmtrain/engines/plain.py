"""A plain PyTorch loop: what Horovod and nn.DataParallel spread over devices."""

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
from llmtrain.engines.forward import forward
from llmtrain.engines.guard import Guard, Measured
from llmtrain.engines.held import held
from llmtrain.engines.norm import gradients_of, squared_norm
from llmtrain.engines.optim import parameter_groups, schedule, torch_optimizer
from llmtrain.engines.pieces import Piece, Region
from llmtrain.engines.seam import StepResult
from llmtrain.engines.state import Place, load_state, pieces_of, resume_schedule, save_state, untrained_pieces
from llmtrain.engines.step import finish, take_step
from llmtrain.engines.writer import Writer
from llmtrain.models.precision import autocast
from llmtrain.recipe import Recipe


class PlainLoop:
    """A loop over micro-batches, a clipped gradient, `optimizer.step()`; nothing else.

    A model in fp32 is trained as it is, or under autocast. For one in a lower type the loop keeps
    fp32 master weights, as mixed precision does (arXiv 1710.03740): they start from the rounded
    weights, collect the gradients of each micro-batch in fp32, and after each step the model's
    weights are their rounded copy.
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
        """The only one."""
        return 0

    def train_step(self, batch: StepBatch) -> StepResult:
        """One update from the sum over all micro-batches, divided by the target tokens."""
        return take_step(self, batch)

    @property
    def learning_rate(self) -> float:
        """Of the step to come."""
        rate: float = self.optimizer.param_groups[0]["lr"]
        return rate

    def start(self) -> None:
        """Sets the training mode; gradients are zero afterwards."""
        self.model.train()
        self.optimizer.zero_grad()

    def passing(self, is_last: bool) -> AbstractContextManager[object]:
        """Of a micro-batch; gradients travel after the last one."""
        return nullcontext()

    def weigh(self, loss_sum: Tensor, target_tokens: int) -> Tensor:
        """Gradients are summed over ranks."""
        return loss_sum / target_tokens

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds the gradients of a micro-batch."""
        loss.backward()  # type: ignore[no-untyped-call]
        self._collect_gradients()

    def finish(self, loss: Tensor) -> Measured:
        """Norm, verdict and update."""
        return finish(self, loss)

    def clip(self) -> Tensor:
        """Reduces the gradients over ranks and clips them; returns their norm before."""
        self._reduce_gradients()
        grad_norm = squared_norm(gradients_of(self.trained), self.device).sqrt().float()
        nn.utils.clip_grads_with_norm_(self.trained, self.recipe.optim.clip_grad_norm or float("inf"), grad_norm)
        return grad_norm

    def update(self) -> None:
        """Has optimizer and schedule take the step."""
        self._update()
        self._round_masters()
        self.scheduler.step()

    def forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Sum of the cross-entropies, and the auxiliary loss as it counts in a mean over micro-batches."""
        with autocast(self.recipe.parallel.precision, self.device.type):
            return self._forward(micro_batch)

    @torch.no_grad()
    def eval_step(self, batch: StepBatch) -> Tensor:
        """Mean cross-entropy over the target tokens."""
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for micro_batch in batch.micro_batches:
            total += self.forward(micro_batch)[0]
        return self._over_ranks(total) / batch.target_tokens

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, tied ones once."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().cpu()

    def save(self, writer: Writer) -> None:
        """Writes this rank's share of the pieces."""
        save_state(self, writer)

    def load(self, folder: Path) -> None:
        """Reads what any engine wrote."""
        load_state(self, folder)

    def pieces(self) -> Iterator[list[Piece]]:
        """Live pieces of everything that is trained, and of what is not."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}

        def place(parameter: nn.Parameter) -> Place:
            return names[parameter], Region.whole(parameter.shape), self._copy

        yield from pieces_of(held(self.optimizer, self.masters), place)
        yield untrained_pieces(self.model, self._copy)

    def progress(self) -> dict[str, Any]:
        """Where the schedule stands."""
        return {"schedule": self.scheduler.last_epoch}

    def resumed(self, progress: dict[str, Any]) -> None:
        """Goes on from written pieces."""
        self._round_masters()
        resume_schedule(self.scheduler, progress["schedule"])

    def describe(self) -> dict[str, Any]:
        """Optimizer class and device."""
        return {"engine": "plain PyTorch", "optimizer": type(self.optimizer).__name__, "device": str(self.device)}

    # What the engines that share this loop do otherwise: Horovod's and nn.DataParallel's.

    def _optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """The optimizer of `trained`."""
        return torch_optimizer(groups, self.recipe.optim)

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """As `forward`, in whose autocast it runs."""
        return forward(self.model, self.model, micro_batch, self.device)

    def _reduce_gradients(self) -> None:
        """Makes the gradients those of the global batch; here they are."""

    def _update(self) -> None:
        self.optimizer.step()

    def measure(self, loss: Tensor, grad_norm: Tensor) -> Measured:
        """Of all ranks, from this one's share of the loss and the norm of the reduced gradients."""
        return Measured(loss, grad_norm)

    def _over_ranks(self, total: Tensor) -> Tensor:
        """The sum of a scalar over all ranks."""
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
        """This rank's number among those that hold the same, and their number."""
        return 0, 1
