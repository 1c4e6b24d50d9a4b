"""`torch.nn.DataParallel`: one process that copies the model to each device of its machine in every pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from llmtrain.data import Completions, MicroBatch, StepBatch
from llmtrain.engines.engine import ChangeGradients, OwnPasses
from llmtrain.engines.forward import forward, next_logits
from llmtrain.engines.plain import PlainLoop, plain_model
from llmtrain.errors import Problem, RecipeError
from llmtrain.models import Objective, OwnLoss, OwnMetrics
from llmtrain.models.recompute.checkpoints import bind_to_copy
from llmtrain.overrides.torch import keep_own_hooks
from llmtrain.plan import Plan


class DataParallel(PlainLoop):
    """Distributes each forward pass over the devices of the process.

    A pass reads the joined micro-batches of all devices. Each replica computes its own loss, so each device returns
    two scalars instead of its logits.
    """

    name = "torch.nn.DataParallel"

    def __init__(self, plan: Plan, device: torch.device) -> None:
        # On a CPU there is nothing to distribute over; by default, DataParallel would use any visible GPUs.
        on_gpus = [torch.device("cuda", index) for index in range(plan.cluster.devices_per_node)]
        self.devices = on_gpus if device.type == "cuda" else [device]
        super().__init__(plain_model(plan, device), plan.recipe, plan.optimizer)

    def _distribute(self, optimizer: Optimizer, trained: dict[str, nn.Parameter]) -> Optimizer:
        """Wraps the model with its loss; the optimizer remains as it is."""
        self.module = _Losses(self.model, self.objective)
        if self.devices[0].type == "cuda":
            self.module = _OverDevices(self.module, device_ids=self.devices)
        return optimizer

    def _losses(self, micro_batch: MicroBatch, metrics: OwnMetrics | None) -> tuple[Tensor, Tensor | None]:
        """Sums the losses over the devices; averages the auxiliary losses of their micro-batches."""
        loss_sums, auxiliaries = self.module(micro_batch, device=self.device, metrics=metrics)
        return loss_sums.sum(), None if auxiliaries is None else auxiliaries.mean()

    def own_passes(
        self, batch: StepBatch, change_gradients: ChangeGradients | None = None
    ) -> AbstractContextManager[OwnPasses]:
        """Raises RecipeError: the replicas return losses instead of outputs."""
        fix = 'give your loss as objective=Custom("mine:loss") and call engine.train_step, or use torchrun'
        message = "DataParallel computes the loss on each of its devices"
        raise RecipeError(Problem("loop.data_parallel", "parallel.backend", message, fix))

    def _next_logits(self, batch: MicroBatch) -> dict[int, Tensor]:
        """Runs the model itself, on the first device."""
        return next_logits(self.model, self.model, batch, self.device)

    def describe(self) -> dict[str, Any]:
        """Adds all devices."""
        return super().describe() | {"device": ", ".join(map(str, self.devices))}


class _OverDevices(nn.DataParallel["_Losses"]):
    """Gives each device some rows of a micro-batch, still on the host, where their documents are known."""

    def scatter(
        self, inputs: tuple[MicroBatch], kwargs: dict[str, Any] | None, device_ids: Sequence[int | torch.device]
    ) -> Any:
        """Returns the arguments of each device."""
        parts = rows_by_device(*inputs, len(device_ids))
        devices = [torch.device("cuda", index) for index in self.device_ids[: len(parts)]]
        return [(part,) for part in parts], [{**(kwargs or {}), "device": device} for device in devices]

    def replicate(self, module: _Losses, device_ids: Sequence[int | torch.device]) -> list[_Losses]:
        """Returns the copies of the module."""
        copies: list[_Losses] = super().replicate(module, device_ids)
        for copy in copies:
            bind_to_copy(copy)
            keep_own_hooks(copy)  # transformers adds hooks in the first pass of a model, and so of every copy
        return copies


def rows_by_device(whole: MicroBatch, devices: int) -> list[MicroBatch]:
    """Divides the rows of a micro-batch, without images and noise, as `torch.chunk` does."""
    completions = whole.completions.tensors if whole.completions else ()
    tensors = (whole.input_ids, whole.position_ids, whole.labels, *completions)
    parts = []
    for ids, positions, labels, *of_rows in zip(*(tensor.chunk(devices) for tensor in tensors), strict=True):
        parts.append(MicroBatch(ids, positions, labels, Completions(*of_rows) if of_rows else None))
    if whole.values is None:
        return parts
    return [replace(part, values=one) for part, one in zip(parts, whole.values.chunk(devices), strict=True)]


class _Losses(nn.Module):
    """A model together with its loss, as one module that DataParallel copies."""

    def __init__(self, model: PreTrainedModel, objective: Objective | OwnLoss | None) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(
        self, part: MicroBatch, device: torch.device, metrics: OwnMetrics | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the sum of the losses and the auxiliary loss of one device's part, each of shape [1].

        part: on the host. metrics: shared by all devices.
        """
        loss_sum, auxiliary = forward(self.model, self.model, part, device, self.objective, metrics=metrics)
        return loss_sum[None], None if auxiliary is None else auxiliary[None]
