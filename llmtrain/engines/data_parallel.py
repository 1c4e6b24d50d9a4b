"""`torch.nn.DataParallel`: one process that copies the model to each device of its machine in every pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmtrain.data import MicroBatch
from llmtrain.engines.forward import check_kernels, forward
from llmtrain.engines.plain import PlainLoop
from llmtrain.models import build_model
from llmtrain.plan import Plan


class TorchDataParallel(PlainLoop):
    """The plain loop, with its forward pass distributed over the devices of the process.

    A pass reads the joined micro-batches of all devices. Each replica computes its own loss, so each device returns
    two scalars instead of its logits.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        recipe = plan.recipe
        model = build_model(recipe, torch.float32, device)
        check_kernels(model.config, plan)
        if recipe.parallel.activation_checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.devices = [device]
        self.replicas: nn.Module = _Losses(model)
        # On a CPU there is nothing to distribute over; by default, DataParallel would use any visible GPUs.
        if device.type == "cuda":
            self.devices = [torch.device("cuda", index) for index in range(plan.cluster.devices_per_node)]
            self.replicas = nn.DataParallel(self.replicas, device_ids=self.devices)
        super().__init__(model, recipe)

    def describe(self) -> dict[str, Any]:
        """Returns a description with the optimizer and the devices."""
        return super().describe() | {"engine": "torch.nn.DataParallel", "device": ", ".join(map(str, self.devices))}

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Sums the losses over the devices; averages the auxiliary losses of their micro-batches."""
        loss_sums, auxiliaries = self.replicas(micro_batch.input_ids, micro_batch.position_ids, micro_batch.labels)
        return loss_sums.sum(), None if auxiliaries is None else auxiliaries.mean()


class _Losses(nn.Module):
    """A model together with its loss, as one module that DataParallel copies."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the sum of the cross-entropies and the auxiliary loss of one device's part, each of shape [1]."""
        part = MicroBatch(input_ids=input_ids, position_ids=position_ids, labels=labels)
        loss_sum, auxiliary = forward(self.model, self.model, part, input_ids.device)
        return loss_sum[None], None if auxiliary is None else auxiliary[None]
