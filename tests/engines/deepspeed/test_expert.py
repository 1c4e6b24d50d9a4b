"""Distributed experts match the plain loop, resume exactly and are exported bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.models import build_model
from tests.helpers.batches import global_batch, step_batch
from tests.helpers.harness import run_ranks
from tests.helpers.moe import moe_recipe
from tests.helpers.traces import (
    Trace,
    assert_same,
    engine_of,
    plain_run,
    plan_of,
    saved_weights,
    trace,
    trace_plan,
    worst,
)

STEPS = 6
SGD = {"optim.name": "sgd", "optim.lr": 0.1}
"""Only here does a wrong clipping show in the weights."""


def _train(rank: int, recipes: list, ranks: int) -> list[Trace]:
    return [trace_plan(plan_of(recipe, ranks), STEPS, rank) for recipe in recipes]


def _reference(recipe) -> Trace:
    """The plain loop in the recipe's micro-batches, which the loss of the router is a mean within."""
    micro = recipe.batch.micro_batch_size
    return plain_run(recipe, STEPS, micro)


def _assert_runs_are_plain(architecture: str, ranks: int, variants: list[dict]) -> None:
    recipes = [moe_recipe(architecture, **fields) for fields in variants]
    expected: dict[str, Trace] = {}
    for rank, runs in enumerate(run_ranks(ranks, _train, recipes, ranks)):
        for fields, recipe, run in zip(variants, recipes, runs, strict=True):
            key = repr((recipe.optim, recipe.batch, recipe.model))
            if key not in expected:
                expected[key] = _reference(recipe)
            assert_same(run, expected[key], (architecture, rank, fields))


@pytest.mark.parametrize(
    "architecture",
    [pytest.param("mixtral", marks=pytest.mark.slow), pytest.param("qwen3_moe", marks=pytest.mark.breadth)],
)
def test_fp32_matches_the_plain_loop(architecture):
    """Untied and tied embeddings; with a dense layer between; four micro-batches, and one."""
    stages = [{"parallel.zero_stage": stage, **SGD} for stage in range(4)]
    others = [
        {"parallel.zero_stage": 0},
        {"parallel.zero_stage": 3, "batch.micro_batch_size": 4},
        {"parallel.zero_stage": 1, **SGD, "optim.clip_grad_norm": 0.0},
        {"parallel.zero_stage": 2, "parallel.offload_optimizer": "cpu"},
        {"parallel.zero_stage": 3, "parallel.activation_checkpointing": "full"},
    ]
    _assert_runs_are_plain(architecture, 2, stages + others)


@pytest.mark.breadth
def test_expert_groups_smaller_than_the_replicas_match_the_plain_loop():
    """Four replicas, two groups of two ranks: gradients of an expert are averaged over the ranks that hold it."""
    _assert_runs_are_plain("qwen3_moe", 4, [{"parallel.zero_stage": stage, **SGD} for stage in (0, 2, 3)])


@pytest.mark.parametrize(
    "architecture",
    [
        *(
            pytest.param(name, marks=pytest.mark.breadth)
            for name in ("deepseek_v3", "qwen2_moe", "qwen3_5_moe_text", "deepseek_v2", "minimax_m3_vl_text")
        ),
    ],
)
def test_every_family_matches_the_plain_loop(architecture):
    _assert_runs_are_plain(architecture, 2, [{"parallel.zero_stage": stage, **SGD} for stage in range(4)])


ADAPTER = {"rank": 4, "alpha": 16.0, "targets": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}


@pytest.mark.parametrize(
    "architecture",
    [pytest.param("mixtral", marks=pytest.mark.slow), pytest.param("gpt_oss", marks=pytest.mark.breadth)],
)
def test_adapters_of_distributed_experts_match_the_plain_loop(architecture):
    """On the ranks of their experts; also beside tensor parallelism, and without trained experts."""
    adapted = {"model.adapter": ADAPTER, "batch.micro_batch_size": 2, "optim.name": "sgd", "optim.lr": 0.3}
    frozen = adapted | {"model.adapter": {**ADAPTER, "target_parameters": []}}
    cases = [adapted | {"parallel.zero_stage": stage} for stage in range(4)]
    _assert_runs_are_plain(architecture, 2, [*cases, frozen | {"parallel.zero_stage": 1}])


@pytest.mark.breadth
def test_distributed_experts_in_4_bit_match_the_plain_loop(tmp_path):
    build_model(moe_recipe("qwen3_moe"), torch.float32, torch.device("cpu")).save_pretrained(tmp_path)
    model = {"architecture": None, "config": {}, "pretrained": str(tmp_path), "adapter": ADAPTER, "quantize": "nf4"}
    variants = [{"parallel.zero_stage": stage, "model": model, "batch.micro_batch_size": 2} for stage in range(3)]
    _assert_runs_are_plain("qwen3_moe", 2, variants)


@pytest.mark.breadth
def test_bf16_stays_near_the_fp32_loop():
    recipes = [moe_recipe(**{"parallel.precision": "bf16", "parallel.zero_stage": stage}) for stage in (1, 2, 3)]
    expected = _reference(moe_recipe())
    for run in run_ranks(2, _train, recipes, 2)[0]:
        assert worst(run.losses, expected.losses) < 2**-8
        assert worst(run.grad_norms, expected.grad_norms) < 2**-6


def _interrupted(rank: int, recipes: list, ranks: int, folder: Path):
    """Of each recipe: an uninterrupted run, one that another engine continues, and the weights where it stopped."""
    found = []
    for index, recipe in enumerate(recipes):
        plan = plan_of(recipe, ranks)
        shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps, rank, ranks)
        whole = trace_plan(plan, STEPS, rank)
        first = engine_of(plan)
        for step in range(STEPS // 2):
            first.train_step(step_batch(step, *shape))
        Saver(folder / str(index), plan, first).save(TrainerState(step=STEPS // 2, data="key"))
        weights = {name: weight.float().numpy().copy() for name, weight in first.named_weights()}
        second = engine_of(plan)
        load(newest(folder / str(index)), second, plan, "key")
        found.append((whole, trace(second, range(STEPS // 2, STEPS), *shape), weights))
    return found


RESUMED = [(0, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")]


@pytest.mark.breadth
def test_a_continued_run_equals_the_uninterrupted_one_and_its_export_bit_for_bit(tmp_path):
    recipes = [
        moe_recipe("qwen3_moe", **{"parallel.zero_stage": stage, "parallel.precision": precision})
        for stage, precision in RESUMED
    ]
    whole_model = build_model(recipes[0], torch.float32, torch.device("cpu"))
    names = dict(whole_model.named_parameters()).keys()
    for rank, results in enumerate(run_ranks(4, _interrupted, recipes, 4, tmp_path)):
        for index, (whole, continued, saved) in enumerate(results):
            assert continued.losses == whole.losses[STEPS // 2 :], RESUMED[index]
            assert continued.grad_norms == whole.grad_norms[STEPS // 2 :], RESUMED[index]
            assert all(np.array_equal(continued.weights[name], whole.weights[name]) for name in names), RESUMED[index]
            if rank == 0:
                exported = saved_weights(newest(tmp_path / str(index)), plan_of(recipes[index], 4))
                assert exported.keys() == names == saved.keys()
                for name in names:
                    assert np.array_equal(exported[name].float().numpy(), saved[name]), (name, RESUMED[index])


def test_zero3_without_expert_groups_does_not_hang():
    """An expert without a token on one rank must not hang ZeRO-3, which gathers what a rank is about to use."""
    config = {"model.config.num_local_experts": 16, "model.config.num_experts_per_tok": 1, "parallel.expert": 1}
    recipe = moe_recipe(**config, **SGD, **{"parallel.zero_stage": 3})
    first, second = _experts_met(recipe, 0), _experts_met(recipe, 1)
    assert first != second
    expected = _reference(recipe)
    for rank, (run,) in enumerate(run_ranks(2, _train, [recipe], 2)):
        assert_same(run, expected, rank)


def _experts_met(recipe, sample: int) -> list[set[int]]:
    """Experts of each layer that the tokens of a sample of the first step go to."""
    model = build_model(recipe, torch.float32, torch.device("cpu"))
    batch = global_batch(0)[sample]
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).router_logits
    return [set(layer.argmax(dim=-1).tolist()) for layer in logits]
