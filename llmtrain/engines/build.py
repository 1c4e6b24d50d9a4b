"""The one place where a plan becomes an engine."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.engines.deepspeed import WEIGHT_DTYPES, DeepSpeedDataParallel
from llmtrain.engines.pipeline import DeepSpeedPipeline
from llmtrain.engines.seam import Engine
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
    if plan.layout.pp > 1:
        dtype = WEIGHT_DTYPES.get(plan.recipe.parallel.precision, torch.float32)
        build = stage_builder(plan.recipe, plan.layout.pp, dtype, device, tensor=plan.layout.tp)
        return DeepSpeedPipeline(plan, ds_config, device, build)
    return DeepSpeedDataParallel(plan, ds_config, device)
