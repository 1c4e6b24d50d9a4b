"""Experts and slices of attention on the same ranks match the plain loop."""

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
from tests.helpers.batches import step_batch
from tests.helpers.harness import run_ranks
from tests.helpers.moe import CONFIGS, moe_recipe
from tests.helpers.traces import Trace, assert_same, engine_of, plain_run, plan_of, saved_weights, trace, worst

STEPS = 4
CPU = torch.device("cpu")
SGD = {"optim.name": "sgd", "optim.lr": 0.1}
"""Only here does a wrong clipping show in the weights."""


def _trace(engine, plan, steps) -> Trace:
    batch = plan.batch
    shape = (
        batch.micro_batch_size,
        batch.gradient_accumulation_steps,
        engine.data_parallel_rank,
        plan.data_parallel_size,
    )
    return trace(engine, steps, *shape)


def _train(rank: int, recipes: list, ranks: int) -> list[Trace]:
    plans = [plan_of(recipe, ranks) for recipe in recipes]
    return [_trace(engine_of(plan), plan, range(STEPS)) for plan in plans]


def _reference(recipe) -> Trace:
    """The plain loop in the recipe's micro-batches, which the loss of the router is a mean within."""
    micro = recipe.batch.micro_batch_size
    return plain_run(recipe, STEPS, micro)


def _assert_runs_are_plain(architecture: str, ranks: int, variants: list[dict]) -> None:
    recipes = [moe_recipe(architecture, **{"parallel.tensor": 2, **fields}) for fields in variants]
    expected: dict[str, Trace] = {}
    for rank, runs in enumerate(run_ranks(ranks, _train, recipes, ranks)):
        for fields, recipe, run in zip(variants, recipes, runs, strict=True):
            key = repr((recipe.optim, recipe.batch, recipe.model))
            if key not in expected:
                expected[key] = _reference(recipe)
            assert_same(run, expected[key], (architecture, rank, fields))


def _stages(*stages: int, **fields) -> list[dict]:
    return [{"parallel.zero_stage": stage, "batch.micro_batch_size": 2, **SGD, **fields} for stage in stages]


@pytest.mark.breadth
def test_fp32_matches_the_plain_loop():
    """One replica, whose two ranks share attention and experts; norms over heads, a dense layer, a tied head."""
    adam = {"parallel.zero_stage": 2, "batch.micro_batch_size": 4, "parallel.activation_checkpointing": "full"}
    _assert_runs_are_plain("qwen3_moe", 2, [*_stages(0, 1, 3), adam])


@pytest.mark.breadth
def test_expert_groups_larger_than_tensor_groups_match_the_plain_loop():
    """Untied; experts on the two ranks of each replica, then on all four, and with slices of sequences."""
    everywhere = {"parallel.expert": 4}
    cases = [*_stages(2), *_stages(0, 1, **everywhere), *_stages(3, **everywhere, **{"optim.clip_grad_norm": 0.0})]
    cases += _stages(1, **{"parallel.sequence": 2})
    _assert_runs_are_plain("mixtral", 4, cases)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=pytest.mark.breadth) for name in CONFIGS],
)
def test_every_family_matches_the_plain_loop(architecture):
    _assert_runs_are_plain(architecture, 4, _stages(0, 1, 2, 3))


@pytest.mark.breadth
def test_slices_of_sequences_match_the_plain_loop_at_every_stage():
    _assert_runs_are_plain("qwen3_moe", 4, _stages(0, 1, 2, 3, **{"parallel.sequence": 2}))


@pytest.mark.breadth
def test_adapters_of_attention_match_the_plain_loop():
    adapter = {"model.adapter": {"rank": 4, "targets": ["q_proj", "o_proj"]}}
    _assert_runs_are_plain("mixtral", 2, _stages(0, 3, **adapter))


BF16 = {"parallel.precision": "bf16"}


@pytest.mark.breadth
def test_bf16_stays_near_the_fp32_loop():
    recipes = [moe_recipe(**BF16, **{"parallel.tensor": 2, "parallel.zero_stage": stage}) for stage in (1, 3)]
    expected = _reference(moe_recipe())
    for run in run_ranks(2, _train, recipes, 2)[0]:
        assert worst(run.losses, expected.losses) < 2**-8
        assert worst(run.grad_norms, expected.grad_norms) < 2**-6


def _square_of_experts(rank: int, recipes: list, ranks: int) -> list[float]:
    """Sum of the squares of the first step's gradients of this rank's experts, as the optimizer gets them."""
    found = []
    for recipe in recipes:
        plan = plan_of(recipe, ranks)
        engine = engine_of(plan)
        optimizer, step = engine.engine.optimizer, engine.engine.optimizer.step

        def look(optimizer=optimizer, step=step) -> None:
            groups = optimizer.get_grads_for_norm()[1].values()
            found.append(sum(float(gradient.square().sum()) for group in groups for gradient in group))
            step()

        optimizer.step = look
        batch = plan.batch
        shape = (
            batch.micro_batch_size,
            batch.gradient_accumulation_steps,
            engine.data_parallel_rank,
            plan.data_parallel_size,
        )
        engine.train_step(step_batch(0, *shape))
    return found


def test_bf16_gradients_of_experts_are_right_in_every_micro_batch():
    """Too small a part of the norm to be seen in it: DeepSpeed would correct those of the first micro-batch only."""
    fields = {**BF16, "parallel.zero_stage": 1}
    recipes = [moe_recipe(**fields, **{"parallel.tensor": tensor}) for tensor in (1, 2)]
    alone, together = np.sum(run_ranks(2, _square_of_experts, recipes, 2), axis=0)
    assert together == pytest.approx(alone, rel=2**-6)


def _interrupted(rank: int, recipes: list, ranks: int, folder: Path):
    """Of each recipe: an uninterrupted run, one that another engine continues, and the weights where it stopped."""
    found = []
    for index, recipe in enumerate(recipes):
        plan = plan_of(recipe, ranks)
        whole = _trace(engine_of(plan), plan, range(STEPS))
        first = engine_of(plan)
        _trace(first, plan, range(STEPS // 2))
        Saver(folder / str(index), plan, first).save(TrainerState(step=STEPS // 2, data="key"))
        weights = {name: weight.float().numpy().copy() for name, weight in first.named_weights()}
        second = engine_of(plan)
        load(newest(folder / str(index)), second, plan, "key")
        found.append((whole, _trace(second, plan, range(STEPS // 2, STEPS)), weights))
    return found


@pytest.mark.parametrize(
    ("architecture", "cases"),
    [
        pytest.param("mixtral", [(0, "fp32", 2), (1, "bf16", 4), (3, "fp32", 2)], marks=pytest.mark.breadth),
        pytest.param("qwen3_moe", [(1, "fp32", 2), (2, "bf16", 4), (3, "bf16", 4)], marks=pytest.mark.breadth),
    ],
)
def test_a_continued_run_equals_the_uninterrupted_one_and_its_export_bit_for_bit(tmp_path, architecture, cases):
    """Of ZeRO stages, precisions and ranks in a group of experts."""
    recipes = [
        moe_recipe(
            architecture,
            **{"parallel.zero_stage": stage, "parallel.precision": precision, "parallel.expert": degree},
            **{"parallel.tensor": 2, "batch.micro_batch_size": 4},
        )
        for stage, precision, degree in cases
    ]
    names = dict(build_model(recipes[0], torch.float32, CPU).named_parameters()).keys()
    by_rank = run_ranks(4, _interrupted, recipes, 4, tmp_path)
    for case, *results in zip(cases, *by_rank, strict=True):
        for whole, continued, _ in results:
            assert continued.losses == whole.losses[STEPS // 2 :], case
            assert continued.grad_norms == whole.grad_norms[STEPS // 2 :], case
            assert all(np.array_equal(continued.weights[name], whole.weights[name]) for name in names), case
    for index, (case, (_, _, saved)) in enumerate(zip(cases, by_rank[0], strict=True)):
        exported = saved_weights(newest(tmp_path / str(index)), plan_of(recipes[index], 4))
        assert exported.keys() == names == saved.keys()
        for name in names:
            assert np.array_equal(exported[name].float().numpy(), saved[name]), (name, case)
