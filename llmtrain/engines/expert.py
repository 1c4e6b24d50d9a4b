"""DeepSpeed AutoEP: the experts of a model spread over groups of data parallel ranks, at any ZeRO stage.

Each rank reads its own samples. A token travels to the rank that holds its expert and back; none is dropped
(`deepspeed/module_inject/auto_ep_layer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.engines.deepspeed import DeepSpeedDataParallel
from llmtrain.engines.expert_names import hugging_face_weights
from llmtrain.engines.optim import parameter_groups
from llmtrain.plan import Plan


class DeepSpeedExpertParallel(DeepSpeedDataParallel):
    """`deepspeed.initialize` with an `expert_parallel` block, which replaces the blocks of experts in the model."""

    def __init__(self, plan: Plan, ds_config: dict[str, Any], device: torch.device) -> None:
        super().__init__(plan, ds_config, device)
        self._norm = torch.zeros((), device=device)
        self._group = groups._get_expert_parallel_group(f"ep_size_{plan.layout.ep}")
        # At ZeRO-0 DeepSpeed clips by the mean of the ranks' norms, of which each has other experts in it.
        self.engine.clip_fp32_gradients = self._clip

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, under its Hugging Face name; tied ones once."""
        blocks = {
            path: module.model_family
            for path, module in self.model.named_modules()
            if isinstance(module, AutoEPMoELayer)
        }
        parameters = dict(self.model.named_parameters())
        for name, weight in hugging_face_weights(parameters, blocks, lambda name: self._whole(parameters[name])):
            yield name, weight.cpu()

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        """Of experts, those of all ranks."""
        own = super()._whole(parameter)
        if getattr(parameter, "allreduce", True):
            return own
        parts = [torch.empty_like(own) for _ in range(self.plan.layout.ep)]
        dist.all_gather(parts, own, group=self._group)
        return torch.cat(parts)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """DeepSpeed takes the experts out of each group into one of their own, and asks for the group's name."""
        made = parameter_groups(self.model, self.plan.recipe.optim.weight_decay)
        return [{"name": f"decay {group['weight_decay']}", **group} for group in made]

    def _holders(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        return super()._holders(parameter) if getattr(parameter, "allreduce", True) else self._group

    def _gradient_norm(self) -> Tensor:
        self._norm = super()._gradient_norm()
        return self._norm

    def _clip(self) -> None:
        """Clips by the norm that was taken just before the step."""
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.plan.recipe.optim.clip_grad_norm, self._norm)
