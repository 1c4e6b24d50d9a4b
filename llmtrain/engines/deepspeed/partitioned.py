"""Models that ZeRO-3 partitions while they are made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import DeepSpeedTensorOverride
from torch import distributed as dist
from torch import nn
from transformers import PreTrainedModel

from llmtrain.models import build_model
from llmtrain.recipe import Recipe


def build_partitioned(
    recipe: Recipe, dtype: torch.dtype, ds_config: dict[str, Any], device: torch.device
) -> PreTrainedModel:
    """Returns the model, which ZeRO-3 partitions over all ranks while it is made."""
    partitioned = partial(_partition, ds_config, None)
    is_reader = dist.get_rank() == 0
    return build_model(recipe, dtype, device, partitioned=partitioned, gather=gather_partitioned, is_reader=is_reader)


def partition_with(
    ds_config: dict[str, Any], replicas: dist.ProcessGroup | None, grid: Any
) -> Callable[[nn.Module], None]:
    """Returns a function that partitions the parameters of a module over `replicas`. grid: describes all groups."""

    def partition(module: nn.Module) -> None:
        _partition(ds_config, replicas, module, grid)

    return partition


def _partition(
    ds_config: dict[str, Any], replicas: dist.ProcessGroup | None, module: nn.Module | None = None, grid: Any = None
) -> AbstractContextManager[object]:
    """Partitions a module or, without one, all modules that are made within the returned context."""
    # Overrides only the device. The parameters have the right dtype already, and forcing it on every new tensor would
    # round the fp32 frequencies of rotary embeddings. `Init(dtype=...)` is no alternative: DeepSpeed 0.19.8 replaces it
    # by bf16 wherever fp16 is not supported.
    context: AbstractContextManager[object] = deepspeed.zero.Init(
        module=module,
        data_parallel_group=replicas,
        config_dict_or_path=ds_config,
        mpu=grid,
        tensor_overrides=[DeepSpeedTensorOverride.device],
    )
    return context


def gather_partitioned(parameters: list[nn.Parameter]) -> AbstractContextManager[object]:
    """Gathers parameters that ZeRO-3 has partitioned; what the first replica writes is broadcast to the others."""
    context: AbstractContextManager[object] = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
    return context
