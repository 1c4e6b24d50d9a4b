"""Tensor parallelism by DeepSpeed's AutoTP, for attention with distributed experts.

DeepSpeed folds expert groups into tensor groups, which it makes itself (`deepspeed/module_inject/auto_ep_folding.py`).
All other models are split by llmtrain's own slices (`llmtrain.engines.deepspeed.tensor`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.module_inject.layers import LinearAllreduce
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.engines.deepspeed.autotp_check import check_autotp
from llmtrain.engines.deepspeed.autotp_split import gather_whole, split_of
from llmtrain.engines.deepspeed.axis import EngineAxis, WeightShard
from llmtrain.engines.runtime.distributed import is_alone
from llmtrain.models import build_model, model_configuration
from llmtrain.models.precision import weight_dtype
from llmtrain.models.recompute.checkpoints import overwrites
from llmtrain.overrides.deepspeed import data_group, make_tensor_groups, skip_input_check, tensor_group


class AutoTPAxis(EngineAxis):
    """Consecutive ranks that share the attention of one replica."""

    def prepare(self, ds_config: dict[str, Any]) -> None:
        """Makes DeepSpeed's groups. Raises FamilyError for a family that computes something else if it is split."""
        make_tensor_groups(self.plan.parallel.tensor)
        if not is_alone():  # a rank alone has no other to compare with, and computes nothing
            config, attention = model_configuration(self.plan.recipe), self.plan.recipe.model.attention_kernel
            check_autotp(config, ds_config["tensor_parallel"], attention, self.device)

    def build(self, ds_config: dict[str, Any]) -> nn.Module | None:
        """Returns the whole model in host memory, where it stays until AutoTP moves its shards to the device.

        The whole model may not fit on the device. Returns None at ZeRO-3, which partitions the model while it is made.
        """
        recipe = self.plan.recipe
        if self.plan.parallel.zero_stage == 3:
            return None
        dtype = weight_dtype(recipe.parallel.precision)
        model: nn.Module = build_model(recipe, dtype, torch.device("cpu"), gather=self._visiting)
        return model

    def attach(self, engine: DeepSpeedEngine) -> None:
        """Removes a check of DeepSpeed that would use other ranks' GPUs; marks layers that sum in place over ranks."""
        skip_input_check(engine)
        for module in engine.module.modules():
            if isinstance(module, LinearAllreduce):
                overwrites(module)

    @contextmanager
    def _visiting(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Moves parameters to the device within the context: its generator draws other numbers than the host's."""
        for parameter in parameters:
            parameter.data = parameter.data.to(self.device)
        yield
        for parameter in parameters:
            parameter.data = parameter.data.cpu()

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same shards.

        By default, DeepSpeed would partition split weights over these ranks, and all other weights over all ranks. It
        would then average and count weights in two ways; with this group, there is only one.
        """
        return data_group()

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup:
        """The ranks of a replica."""
        return tensor_group()

    def weight_shard(self, name: str, tensor: Tensor) -> WeightShard | None:
        """Returns this rank's shard of a layer that AutoTP has split."""
        split = split_of(tensor)
        if split is None:
            return None
        return WeightShard(split.slice_of_rank(dist.get_rank(tensor_group())), tensor_group(), data_group())

    def full_tensor(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """Gathers the shards of a split weight."""
        return gather_whole(shard, split_of(parameter), tensor_group())
