"""Plain PyTorch in one process: what every strategy must agree with."""

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
from llmtrain.engines.optim import parameter_groups, schedule, torch_optimizer
from llmtrain.engines.seam import StepResult
from llmtrain.recipe import Recipe

FILE = "reference.pt"
"""What the engine writes into a checkpoint."""


class ReferenceEngine:
    """A loop over micro-batches, `clip_grad_norm_`, `optimizer.step()`; nothing else.

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

    @property
    def data_parallel_rank(self) -> int:
        """The only one."""
        return 0

    def train_step(self, batch: StepBatch) -> StepResult:
        """One update from the sum over all micro-batches, divided by the target tokens."""
        self.model.train()
        self.optimizer.zero_grad()
        lr = self.optimizer.param_groups[0]["lr"]
        total = torch.zeros((), device=self.device)
        for micro_batch in batch.micro_batches:
            with self._autocast():
                loss_sum, auxiliary = self._forward(micro_batch)
            loss = loss_sum / batch.target_tokens
            if auxiliary is not None:
                loss = loss + auxiliary / len(batch.micro_batches)
            loss.backward()  # type: ignore[no-untyped-call]
            self._collect_gradients()
            total += loss_sum.detach()
        limit = self.recipe.optim.clip_grad_norm or float("inf")
        self._reduce_gradients()
        grad_norm = nn.utils.clip_grad_norm_(self.trained, limit)
        self._update()
        self._round_masters()
        self.scheduler.step()
        return StepResult(loss=self._over_ranks(total) / batch.target_tokens, grad_norm=grad_norm, lr=lr)

    @torch.no_grad()
    def eval_step(self, batch: StepBatch) -> Tensor:
        """Mean cross-entropy over the target tokens."""
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for micro_batch in batch.micro_batches:
            with self._autocast():
                total += self._forward(micro_batch)[0]
        return self._over_ranks(total) / batch.target_tokens

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, tied ones once."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().cpu()

    def save(self, folder: Path) -> None:
        """Writes one file, `reference.pt`."""
        torch.save(self._state(), folder / FILE)

    def load(self, folder: Path) -> None:
        """Reads `reference.pt`."""
        state = torch.load(folder / FILE, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        for master, value in zip(self.masters.values(), state["masters"], strict=True):
            master.data.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def describe(self) -> dict[str, Any]:
        """Optimizer class and device."""
        return {"engine": "plain PyTorch", "optimizer": type(self.optimizer).__name__, "device": str(self.device)}

    # What the engines that share this loop do otherwise: Horovod's and nn.DataParallel's.

    def _optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """The optimizer of `trained`."""
        return torch_optimizer(groups, self.recipe.optim)

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Sum of the cross-entropies, and the auxiliary loss as it counts in a mean over micro-batches."""
        return forward(self.model, self.model.config, micro_batch, self.device)

    def _reduce_gradients(self) -> None:
        """Makes the gradients those of the global batch; here they are."""

    def _update(self) -> None:
        self.optimizer.step()

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

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "masters": [master.detach() for master in self.masters.values()],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = {"autocast_bf16": torch.bfloat16, "autocast_fp16": torch.float16}.get(self.recipe.parallel.precision)
        return torch.autocast(self.device.type, dtype=dtype) if dtype else nullcontext()


def saved_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint of this engine, under their Hugging Face names."""
    weights: dict[str, Tensor] = torch.load(checkpoint / FILE, map_location="cpu", mmap=True, weights_only=True)[
        "model"
    ]
    return weights
