"""Tensor parallel × data parallel through DeepSpeed's AutoTP, at every ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from llmtrain.engines.alone import is_alone
from llmtrain.engines.deepspeed import WEIGHT_DTYPES, DeepSpeedDataParallel
from llmtrain.engines.groups import data_group, make_tensor_groups, tensor_group
from llmtrain.engines.pieces import Region
from llmtrain.engines.shards import gather_whole, split_of
from llmtrain.engines.state import multiplied
from llmtrain.engines.tensor_check import check_split
from llmtrain.models import build_model, model_configuration
from llmtrain.plan import Plan


class DeepSpeedTensorParallel(DeepSpeedDataParallel):
    """A causal LM whose layers are cut over the ranks of a group, as the model's own `tp_plan` says."""

    def __init__(self, plan: Plan, ds_config: dict[str, Any], device: torch.device) -> None:
        make_tensor_groups(plan.layout.tp)
        if not is_alone():  # else there is nobody to compare with, and nothing is computed
            attention = plan.recipe.model.attention_kernel
            check_split(model_configuration(plan.recipe), ds_config["tensor_parallel"], attention, device)
        super().__init__(plan, ds_config, device)

    @property
    def data_parallel_rank(self) -> int:
        """Consecutive ranks share one replica, and so its samples."""
        return dist.get_rank() // self.plan.layout.tp

    @property
    def _replicas(self) -> dist.ProcessGroup:
        # DeepSpeed would partition over all ranks what it does not cut, and the shards over these: a weight
        # would then be averaged and counted in one of two ways. Here there is one.
        return data_group()

    def _region(self, name: str, parameter: nn.Parameter) -> Region:
        split = split_of(parameter)
        return split.region(dist.get_rank(tensor_group())) if split else super()._region(name, parameter)

    def _split(self, tensor: Tensor) -> tuple[Region, tuple[int, int]] | None:
        split, copies = split_of(tensor), data_group()
        here = dist.get_rank(copies), dist.get_world_size(copies)
        return (split.region(dist.get_rank(tensor_group())), here) if split else None

    def _copy(self, parameter: nn.Parameter) -> tuple[int, int]:
        copy = super()._copy(parameter)
        if split_of(parameter):
            return copy
        return multiplied(copy, (dist.get_rank(tensor_group()), dist.get_world_size(tensor_group())))

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        return gather_whole(super()._whole(parameter), split_of(parameter), tensor_group())

    def _build_model(self, ds_config: dict[str, Any]) -> PreTrainedModel:
        recipe = self.plan.recipe
        dtype = WEIGHT_DTYPES.get(recipe.parallel.precision, torch.float32)
        if self.plan.layout.zero_stage == 3:
            return super()._build_model(ds_config)
        # The whole model may not fit on the device: it waits in host memory until AutoTP moves the shards.
        return build_model(recipe, dtype, torch.device("cpu"), gather=self._visiting)

    @contextmanager
    def _visiting(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Has parameters on the device inside the context: its generator draws other numbers than the host's."""
        for parameter in parameters:
            parameter.data = parameter.data.to(self.device)
        yield
        for parameter in parameters:
            parameter.data = parameter.data.cpu()

    def _holders(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        return tensor_group() if split_of(parameter) else super()._holders(parameter)
