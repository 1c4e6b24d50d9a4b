"""The one place where a plan becomes an engine."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.engines.data_parallel import TorchDataParallel
from llmtrain.engines.deepspeed import WEIGHT_DTYPES, DeepSpeedDataParallel
from llmtrain.engines.expert import DeepSpeedExpertParallel
from llmtrain.engines.groups import forget_groups
from llmtrain.engines.pipeline import DeepSpeedPipeline
from llmtrain.engines.seam import Engine
from llmtrain.engines.sequence import DeepSpeedSequence
from llmtrain.engines.tensor import DeepSpeedTensorParallel
from llmtrain.models import stage_builder
from llmtrain.plan import Plan
from llmtrain.plan.runnable import check_runnable


def build_engine(plan: Plan, ds_config: dict[str, Any], device: torch.device) -> Engine:
    """The engine of a plan, with its model, optimizer and schedule.

    Order: weights (partitioned by ZeRO-3 while they are made), activation checkpointing, optimizer
    groups, DeepSpeed. A pipeline's ranks build their own stage only, or
    their slices of it. Raises RecipeError for a layout
    that no engine runs.
    """
    check_runnable(plan)
    forget_groups()
    if plan.layout.pp > 1:
        dtype = WEIGHT_DTYPES.get(plan.recipe.parallel.precision, torch.float32)
        build = stage_builder(plan.recipe, plan.layout.pp, dtype, device, tensor=plan.layout.tp)
        return DeepSpeedPipeline(plan, ds_config, device, build)
    if plan.recipe.parallel.backend == "horovod":
        # Here and not above: it is installed where somebody wants it.
        from llmtrain.engines.horovod import HorovodDataParallel

        return HorovodDataParallel(plan, device)
    if plan.recipe.parallel.backend == "data_parallel":
        return TorchDataParallel(plan, device)
    if plan.recipe.parallel.backend == "accelerate":
        # Here and not above: who has no accelerate can train without it.
        from llmtrain.engines.accelerated import AcceleratedDataParallel, AcceleratedDeepSpeed

        if plan.recipe.parallel.strategy == "deepspeed":
            return AcceleratedDeepSpeed(plan, ds_config, device)
        return AcceleratedDataParallel(plan, device)
    if plan.layout.sp > 1:
        return DeepSpeedSequence(plan, ds_config, device)
    if plan.layout.tp > 1:
        return DeepSpeedTensorParallel(plan, ds_config, device)
    if plan.layout.ep > 1:
        return DeepSpeedExpertParallel(plan, ds_config, device)
    return DeepSpeedDataParallel(plan, ds_config, device)
