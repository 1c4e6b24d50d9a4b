"""Builds the engine of a plan."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.engines.data_parallel import TorchDataParallel
from llmtrain.engines.deepspeed.axis import Axis
from llmtrain.engines.deepspeed.engine import DeepSpeedEngine
from llmtrain.engines.deepspeed.expert import ExpertAxis
from llmtrain.engines.deepspeed.pipeline import PipelineAxis
from llmtrain.engines.deepspeed.sequence import SequenceAxis
from llmtrain.engines.deepspeed.tensor import TensorAxis
from llmtrain.engines.engine import Engine
from llmtrain.overrides import check_overrides
from llmtrain.overrides.deepspeed import forget_groups
from llmtrain.plan import Plan
from llmtrain.plan.installed import check_runnable
from llmtrain.runtime.host_memory import keep_freed_memory


def build_engine(plan: Plan, ds_config: dict[str, Any], device: torch.device) -> Engine:
    """Returns the engine of a plan, with its model, optimizer and schedule.

    The order is: weights, activation checkpointing, optimizer groups, DeepSpeed, which divides by tensors and experts.
    ZeRO-3 partitions the weights while they are made. A rank of a pipeline makes only the weights of its stage, or its
    slices of them. Raises RecipeError for a model that the plan cannot split.
    """
    check_runnable(plan)
    check_overrides()
    forget_groups()
    if device.type == "cpu":
        keep_freed_memory(plan)
        if isinstance(threads := plan.recipe.kernels.threads, int):
            torch.set_num_threads(threads)
    backend = plan.recipe.parallel.backend
    if backend == "accelerate":
        return _accelerated_engine(plan, ds_config, device)
    if backend == "horovod":
        # Imported here because Horovod is an optional dependency.
        from llmtrain.engines.horovod import HorovodDataParallel

        return HorovodDataParallel(plan, device)
    if backend == "data_parallel":
        return TorchDataParallel(plan, device)
    return DeepSpeedEngine(plan, ds_config, device, _axes(plan, device))


def _accelerated_engine(plan: Plan, ds_config: dict[str, Any], device: torch.device) -> Engine:
    # Imported here because accelerate is an optional dependency.
    from llmtrain.engines.accelerated import AcceleratedDataParallel, AcceleratedDeepSpeed

    if plan.recipe.parallel.strategy == "deepspeed":
        return AcceleratedDeepSpeed(plan, ds_config, device)
    return AcceleratedDataParallel(plan, device)


def _axes(plan: Plan, device: torch.device) -> list[Axis]:
    """Returns the axes of a degree above 1. Those that divide weights come before one that only divides tokens."""
    parallel = plan.parallel
    # The pipeline splits its stages itself, because DeepSpeed's AutoTP cannot be combined with it.
    kinds: list[tuple[int, type[Axis]]] = [
        (parallel.pipeline, PipelineAxis),
        (parallel.expert, ExpertAxis),
        (parallel.tensor if parallel.pipeline == 1 else 1, TensorAxis),
        (parallel.sequence, SequenceAxis),
    ]
    return [kind(plan, device) for degree, kind in kinds if degree > 1]
