"""Plain PyTorch in one process: what every strategy must agree with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmtrain.data import StepBatch
from llmtrain.engines.forward import forward
from llmtrain.engines.optim import parameter_groups, schedule, torch_optimizer
from llmtrain.engines.seam import StepResult
from llmtrain.recipe import Recipe


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
        self.optimizer = torch_optimizer(groups, recipe.optim)
        self.scheduler = schedule(self.optimizer, recipe)

    @property
    def data_parallel_rank(self) -> int:
        """The only one."""
        return 0

    def train_step(self, batch: StepBatch) -> StepResult:
        """One update from the sum over all micro-batches, divided by the target tokens."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        lr = self.optimizer.param_groups[0]["lr"]
        total = torch.zeros((), device=self.device)
        for micro_batch in batch.micro_batches:
            with self._autocast():
                loss_sum, auxiliary = forward(self.model, self.model.config, micro_batch, self.device)
            loss = loss_sum / batch.target_tokens
            if auxiliary is not None:
                loss = loss + auxiliary / len(batch.micro_batches)
            loss.backward()  # type: ignore[no-untyped-call]
            self._collect_gradients()
            total += loss_sum.detach()
        limit = self.recipe.optim.clip_grad_norm or float("inf")
        grad_norm = nn.utils.clip_grad_norm_(self.trained, limit)
        self.optimizer.step()
        self._round_masters()
        self.scheduler.step()
        return StepResult(loss=total / batch.target_tokens, grad_norm=grad_norm, lr=lr)

    @torch.no_grad()
    def eval_step(self, batch: StepBatch) -> Tensor:
        """Mean cross-entropy over the target tokens."""
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for micro_batch in batch.micro_batches:
            with self._autocast():
                total += forward(self.model, self.model.config, micro_batch, self.device)[0]
        return total / batch.target_tokens

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, tied ones once."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().cpu()

    def save(self, folder: Path) -> None:
        """Writes one file, `reference.pt`."""
        torch.save(self._state(), folder / "reference.pt")

    def load(self, folder: Path) -> None:
        """Reads `reference.pt`."""
        state = torch.load(folder / "reference.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        for master, value in zip(self.masters.values(), state["masters"], strict=True):
            master.data.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def describe(self) -> dict[str, Any]:
        """Optimizer class and device."""
        return {"engine": "plain PyTorch", "optimizer": type(self.optimizer).__name__, "device": str(self.device)}

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
