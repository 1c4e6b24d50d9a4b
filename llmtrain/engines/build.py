"""Builds the engine of a plan."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.engines.data_parallel import DataParallel
from llmtrain.engines.deepspeed.axis import EngineAxis
from llmtrain.engines.deepspeed.engine import DeepSpeedEngine
from llmtrain.engines.deepspeed.expert import ExpertAxis
from llmtrain.engines.deepspeed.pipeline import PipelineAxis
from llmtrain.engines.deepspeed.sequence import SequenceAxis
from llmtrain.engines.deepspeed.tensor import TensorAxis
from llmtrain.engines.engine import Engine
from llmtrain.engines.runtime.cpu import keep_freed_memory, use_kernels_of_cpu
from llmtrain.overrides import check_overrides
from llmtrain.overrides.deepspeed import reset_groups
from llmtrain.plan import Plan
from llmtrain.plan.installed import check_runnable


def build_engine(plan: Plan, ds_config: dict[str, Any], device: torch.device) -> Engine:
    """Returns the engine of a plan, with its model, optimizer and schedule.

    The order is: weights, activation checkpointing, kernels, optimizer groups, DeepSpeed. ZeRO-3 partitions the weights
    while they are made. A rank makes only the weights of its stage, its slices of them, and its experts. Raises
    RecipeError for a model that the plan cannot split.
    """
    check_runnable(plan)
    check_overrides()
    reset_groups()
    if device.type == "cpu":
        keep_freed_memory(plan)
        use_kernels_of_cpu(plan)
    backend, strategy = plan.recipe.parallel.backend, plan.recipe.parallel.strategy
    # Some modules are imported here because accelerate and Horovod are optional dependencies.
    if backend == "deepspeed":
        return DeepSpeedEngine(plan, ds_config, device, _axes(plan, device))
    if strategy == "deepspeed":
        from llmtrain.engines.accelerated import NAME, initialise_deepspeed

        return DeepSpeedEngine(plan, ds_config, device, initialise=initialise_deepspeed, prepared_by=NAME)
    if backend == "accelerate":
        from llmtrain.engines.accelerated import Accelerated

        return Accelerated(plan, device)
    if backend == "horovod":
        from llmtrain.engines.horovod import Horovod

        return Horovod(plan, device)
    return DataParallel(plan, device)


def _axes(plan: Plan, device: torch.device) -> list[EngineAxis]:
    """Returns the axes of a degree above 1. Those that divide weights come before one that only divides tokens."""
    parallel = plan.parallel
    # The pipeline splits its stages itself.
    kinds: list[tuple[int, type[EngineAxis]]] = [
        (parallel.pipeline, PipelineAxis),
        (parallel.expert, ExpertAxis),
        (1 if plan.stages else parallel.tensor, TensorAxis),
        (parallel.sequence, SequenceAxis),
    ]
    return [kind(plan, device) for degree, kind in kinds if degree > 1]
