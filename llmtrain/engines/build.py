"""The one place where a plan becomes an engine."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.engines.deepspeed import DeepSpeedDataParallel
from llmtrain.engines.seam import Engine
from llmtrain.plan import Plan
from llmtrain.plan.runnable import check_runnable


def build_engine(plan: Plan, ds_config: dict[str, Any], device: torch.device) -> Engine:
    """The engine of a plan, with its model, optimizer and schedule.

    Order: weights (partitioned by ZeRO-3 while they are made), activation checkpointing, optimizer
    groups, DeepSpeed. Raises RecipeError for a layout that no engine runs.
    """
    check_runnable(plan)
    return DeepSpeedDataParallel(plan, ds_config, device)
