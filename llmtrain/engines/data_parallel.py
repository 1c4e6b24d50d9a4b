"""`torch.nn.DataParallel`: one process that copies the model to each device of its machine in every pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
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
            self.module = nn.DataParallel(self.module, device_ids=self.devices)
        return optimizer

    def _losses(self, micro_batch: MicroBatch, metrics: OwnMetrics | None) -> tuple[Tensor, Tensor | None]:
        """Sums the losses over the devices; averages the auxiliary losses of their micro-batches."""
        completions = micro_batch.completions.tensors if micro_batch.completions else ()
        inputs = (micro_batch.input_ids, micro_batch.position_ids, micro_batch.labels, micro_batch.values, *completions)
        loss_sums, auxiliaries = self.module(*inputs, metrics=metrics)
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


class _Losses(nn.Module):
    """A model together with its loss, as one module that DataParallel copies."""

    def __init__(self, model: PreTrainedModel, objective: Objective | OwnLoss | None) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        values: Tensor | None,
        *completions: Tensor,
        metrics: OwnMetrics | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the sum of the losses and the auxiliary loss of one device's part, each of shape [1].

        completions: the tensors of `Completions`, if there are any. metrics: shared by all devices.
        """
        of_pairs = Completions(*completions) if completions else None
        part = MicroBatch(input_ids, position_ids, labels, of_pairs, values)
        device = input_ids.device
        loss_sum, auxiliary = forward(self.model, self.model, part, device, self.objective, metrics=metrics)
        return loss_sum[None], None if auxiliary is None else auxiliary[None]
