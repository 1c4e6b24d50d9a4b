"""Combinations of sequence parallelism with all other axes match the plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.moe import moe_recipe
from tests.helpers.traces import Trace, assert_same, plain_run, plan_of, trace_plan

STEPS = 5
SGD = {"optim.name": "sgd", "optim.lr": 0.1}
SEQUENCE = {"parallel.sequence": 2}
TENSOR = SEQUENCE | {"parallel.tensor": 2}
PIPELINE = SEQUENCE | {"parallel.pipeline": 2, "parallel.zero_stage": 1}
CHECKPOINTING = {"parallel.activation_checkpointing": "full"}


def _recipe(fields):
    degrees = [fields.get(f"parallel.{name}", 1) for name in ("sequence", "tensor", "pipeline")]
    return tiny_recipe(**{"batch.micro_batch_size": 2} | fields), int(np.prod(degrees))


def _train(rank: int, replicas: int, cases) -> list[Trace]:
    plans = [plan_of(recipe, size * replicas) for recipe, size in map(_recipe, cases)]
    return [
        trace_plan(plan, STEPS, rank // (plan.parallel.tensor * plan.parallel.sequence) % plan.data_parallel_size)
        for plan in plans
    ]


def _compare(by_rank: list[list[Trace]], cases) -> None:
    for results in by_rank:
        for case, run in zip(cases, results, strict=True):
            plain = {key: value for key, value in case.items() if not key.startswith("parallel")}
            expected = plain_run(tiny_recipe(**plain), STEPS)
            assert_same(run, expected, case)


@pytest.mark.breadth
def test_sequence_with_tensor_groups_or_stages_matches_the_reference():
    cases = [TENSOR, TENSOR | SGD | {"parallel.zero_stage": 3}, PIPELINE, PIPELINE | SGD | CHECKPOINTING]
    _compare(run_ranks(4, _train, 1, cases), cases)


def _train_experts(rank: int, cases, ranks: int) -> list[Trace]:
    plans = [plan_of(moe_recipe(architecture, **fields), ranks) for architecture, fields in cases]
    inner = [plan.parallel.tensor * plan.parallel.sequence for plan in plans]
    return [
        trace_plan(plan, STEPS, rank // one % plan.data_parallel_size) for plan, one in zip(plans, inner, strict=True)
    ]


@pytest.mark.breadth
def test_experts_on_sequence_parallel_ranks_match_the_reference():
    """With the loss of the router, which is a product of means over whole sequences."""
    stages = [{"parallel.zero_stage": stage, "batch.micro_batch_size": 2} for stage in (0, 1, 3)]
    cases = [(family, SEQUENCE | SGD | stage) for family in ("mixtral", "qwen3_moe") for stage in stages]
    offloaded = {"parallel.offload_optimizer": "cpu", "model.attention": "varlen"}  # as recipes/qwen3_30b_a3b.py
    cases.append(("qwen3_moe", SEQUENCE | SGD | stages[1] | offloaded))
    for results in run_ranks(2, _train_experts, cases, 2):
        for (family, fields), run in zip(cases, results, strict=True):
            expected = plain_run(moe_recipe(family, **SGD, **{"parallel.expert": 1}), STEPS, 2)
            assert_same(run, expected, (family, fields))


@pytest.mark.breadth
def test_experts_of_stages_match_the_reference():
    """Two replicas of two stages; then tensor parallel ranks that share stages and experts; two stages per rank."""
    pipeline = {"parallel.pipeline": 2, "parallel.zero_stage": 1, "batch.micro_batch_size": 2}
    more = {"parallel.pipeline_schedule": "interleaved", "parallel.pipeline_chunks": 2}
    cases = [
        ("mixtral", pipeline | SGD),
        ("mixtral", pipeline | {"parallel.tensor": 2}),
        ("gpt_oss", pipeline | SGD),
        ("mixtral", pipeline | SGD | more | {"model.config.num_hidden_layers": 4}),
    ]
    for results in run_ranks(4, _train_experts, cases, 4):
        for (family, fields), run in zip(cases, results, strict=True):
            plain = {key: value for key, value in fields.items() if not key.startswith(("parallel", "batch"))}
            assert_same(
                run, plain_run(moe_recipe(family, **plain, **{"parallel.expert": 1}), STEPS, 2), (family, fields)
            )


@pytest.mark.slow
def test_all_axes_at_once_match_the_reference():
    everything = PIPELINE | TENSOR
    cases = [everything, everything | SGD, {**everything, "parallel.zero_stage": 0, "optim.clip_grad_norm": 0.0}]
    _compare(run_ranks(8, _train, 1, cases, timeout=500), cases)


@pytest.mark.breadth
def test_hybrids_with_data_parallel_replicas_match_the_reference():
    cases = [TENSOR | {"parallel.zero_stage": 2}, PIPELINE | SGD]
    _compare(run_ranks(8, _train, 2, cases, timeout=500), cases)
