"""The one place where a plan becomes an engine."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.engines.data_parallel import TorchDataParallel
from llmtrain.engines.deepspeed import DeepSpeedDataParallel
from llmtrain.engines.expert import DeepSpeedExpertParallel
from llmtrain.engines.expert_tensor import DeepSpeedExpertTensor
from llmtrain.engines.groups import forget_groups
from llmtrain.engines.host_memory import keep_freed_memory
from llmtrain.engines.pipeline import DeepSpeedPipeline
from llmtrain.engines.seam import Engine
from llmtrain.engines.sequence import (
    DeepSpeedExpertSequence,
    DeepSpeedExpertTensorSequence,
    DeepSpeedSequence,
    DeepSpeedTensorSequence,
)
from llmtrain.engines.tensor import DeepSpeedTensorParallel
from llmtrain.plan import Layout, Plan
from llmtrain.plan.runnable import check_runnable


def build_engine(plan: Plan, ds_config: dict[str, Any], device: torch.device) -> Engine:
    """The engine of a plan, with its model, optimizer and schedule.

    Order: weights (partitioned by ZeRO-3 while they are made; those of a pipeline's stage, or this
    rank's slices of it, and no others), activation checkpointing, optimizer groups, DeepSpeed, which
    cuts by tensors and experts. Raises RecipeError for a model that the plan cannot split.
    """
    check_runnable(plan)
    forget_groups()
    if device.type == "cpu":
        keep_freed_memory(plan)
        if isinstance(threads := plan.recipe.kernels.threads, int):
            torch.set_num_threads(threads)
    backend = plan.recipe.parallel.backend
    if backend == "accelerate":
        return _accelerated_engine(plan, ds_config, device)
    if backend == "horovod":
        # Here and not above: it is installed where somebody wants it.
        from llmtrain.engines.horovod import HorovodDataParallel

        return HorovodDataParallel(plan, device)
    if backend == "data_parallel":
        return TorchDataParallel(plan, device)
    if plan.layout.pp > 1:
        return DeepSpeedPipeline(plan, ds_config, device)
    return _whole_model_engine(plan.layout)(plan, ds_config, device)


def _accelerated_engine(plan: Plan, ds_config: dict[str, Any], device: torch.device) -> Engine:
    # Here and not above: who has no accelerate can train without it.
    from llmtrain.engines.accelerated import AcceleratedDataParallel, AcceleratedDeepSpeed

    if plan.recipe.parallel.strategy == "deepspeed":
        return AcceleratedDeepSpeed(plan, ds_config, device)
    return AcceleratedDataParallel(plan, device)


def _whole_model_engine(layout: Layout) -> type[DeepSpeedDataParallel]:
    """The engine for a model that is not cut into stages, by which degrees are above 1."""
    engines: dict[tuple[bool, bool, bool], type[DeepSpeedDataParallel]] = {
        # tensor, sequence, expert
        (False, False, False): DeepSpeedDataParallel,
        (True, False, False): DeepSpeedTensorParallel,
        (False, True, False): DeepSpeedSequence,
        (False, False, True): DeepSpeedExpertParallel,
        (True, True, False): DeepSpeedTensorSequence,
        (False, True, True): DeepSpeedExpertSequence,
        (True, False, True): DeepSpeedExpertTensor,
        (True, True, True): DeepSpeedExpertTensorSequence,
    }
    return engines[layout.tp > 1, layout.sp > 1, layout.ep > 1]
