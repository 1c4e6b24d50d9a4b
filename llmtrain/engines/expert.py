"""DeepSpeed AutoEP: the experts of a model spread over groups of data parallel ranks, at any ZeRO stage.

Each rank reads its own samples. A token travels to the rank that holds its expert and back; none is dropped
(`deepspeed/module_inject/auto_ep_layer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.engines.deepspeed import DeepSpeedDataParallel, shape_of
from llmtrain.engines.expert_names import hugging_face_weights, own_name, region_of_experts
from llmtrain.engines.optim import parameter_groups
from llmtrain.engines.pieces import Region
from llmtrain.plan import Plan


class DeepSpeedExpertParallel(DeepSpeedDataParallel):
    """`deepspeed.initialize` with an `expert_parallel` block, which replaces the blocks of experts in the model."""

    def __init__(self, plan: Plan, ds_config: dict[str, Any], device: torch.device) -> None:
        super().__init__(plan, ds_config, device)
        self._group = groups._get_expert_parallel_group(f"ep_size_{plan.layout.ep}")

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, under its Hugging Face name; tied ones once."""
        parameters = dict(self.model.named_parameters())
        for name, weight in hugging_face_weights(parameters, self._blocks, lambda name: self._whole(parameters[name])):
            yield name, weight.cpu()

    @cached_property
    def _blocks(self) -> dict[str, str]:
        """Paths of DeepSpeed's blocks of experts, and their presets."""
        return {
            path: module.model_family
            for path, module in self.model.named_modules()
            if isinstance(module, AutoEPMoELayer)
        }

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        """Of experts, those of all ranks."""
        own = super()._whole(parameter)
        if not is_expert(parameter):
            return own
        parts = [torch.empty_like(own) for _ in range(self.plan.layout.ep)]
        dist.all_gather(parts, own, group=self._group)
        return torch.cat(parts)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """DeepSpeed takes the experts out of each group into one of their own, and asks for the group's name."""
        made = parameter_groups(self.model, self.plan.recipe.optim.weight_decay)
        return [{"name": f"decay {group['weight_decay']}", **group} for group in made]

    def _hugging_face_name(self, name: str) -> str:
        return own_name(name, self._blocks)

    def _region(self, name: str, parameter: nn.Parameter) -> Region:
        if not is_expert(parameter):
            return super()._region(name, parameter)
        return region_of_experts(name, shape_of(parameter), dist.get_rank(self._group), self.plan.layout.ep)

    def _copy(self, parameter: nn.Parameter) -> tuple[int, int]:
        if not is_expert(parameter):
            return super()._copy(parameter)
        return self._copy_in(groups._get_expert_data_parallel_group(parameter.group_name))  # type: ignore[attr-defined]

    def _holders(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        return super()._holders(parameter) if not is_expert(parameter) else self._group


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed has spread a parameter: it marks those that not all ranks reduce together."""
    return not getattr(parameter, "allreduce", True)
