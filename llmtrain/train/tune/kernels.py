"""Decides which kernels a run uses, on rank 0, before an engine is built."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llmtrain.engines.runtime.agree import broadcast
from llmtrain.errors import RecipeError
from llmtrain.launch import Rank
from llmtrain.plan import KernelChoice, Plan
from llmtrain.train.tune.choice import apply, device_name, key_of_run, open_kernels, read_cached, threads_of_a_rank
from llmtrain.train.tune.request import NotMeasuredError, measure

WORTH_FLOPS = 1e15
"""FLOPs of a rank in a run, below which no device is slow enough for measuring to be worthwhile."""


def with_kernels(plan: Plan, device: torch.device, rank: Rank, say: Callable[[str], None]) -> Plan:
    """Returns the plan with the kernels that its recipe leaves open; called by all ranks before an engine is built.

    say: called with the value that is measured next. Raises RecipeError on all ranks if the model cannot be computed,
    or if it is slower in the fp8 that its recipe chooses.
    """
    if not open_kernels(plan.recipe) and plan.recipe.kernels.fp8 == "off":
        return plan
    choice, problems = None, []
    if rank.is_main:
        try:
            choice = _choose(plan, device, threads_of_a_rank(rank.local_world_size), say)
        except RecipeError as error:
            problems = list(error.problems)
    choice, problems = broadcast((choice, problems))
    if problems or choice is None:
        raise RecipeError(problems)
    return apply(plan, choice)


def _choose(plan: Plan, device: torch.device, threads: int, say: Callable[[str], None]) -> KernelChoice:
    name = device_name(device, threads)
    key = key_of_run(plan, name)
    if plan.kernels is not None and plan.kernels.key == key:
        return plan.kernels
    if cached := read_cached(plan.recipe.data, key):
        return cached
    steps = plan.recipe.train.steps * plan.batch.tokens_per_step / plan.cluster.world_size
    if plan.flops_per_token * steps < WORTH_FLOPS and plan.recipe.kernels.fp8 == "off":
        why = "chosen by the rules, because the run is too short to measure; run `llmtrain tune` to measure"
        return KernelChoice(key=key, device=name, why=why, values={})
    try:
        return measure(plan, str(device), threads, always=False, say=say)
    except NotMeasuredError as error:
        why = f"chosen by the rules, because measuring failed: {error}"
        return KernelChoice(key=key, device=name, why=why, values={})
