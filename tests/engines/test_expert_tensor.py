"""Experts and slices of attention on the same ranks compute the run of a plain PyTorch loop."""

from __future__ import annotations

import numpy as np
import pytest
from batches import GLOBAL_BATCH
from harness import run_ranks
from moe import moe_recipe
from traces import Trace, engine_of, plan_of, reference_of, trace, worst

STEPS = 6
FP32 = 1e-5
"""As derived in `test_parity`."""
SGD = {"optim.name": "sgd", "optim.lr": 0.1}
"""Only here does a wrong clipping show in the weights."""


def _trace(engine, plan, steps) -> Trace:
    batch = plan.batch
    shape = (batch.micro_batch_size, batch.gradient_accumulation_steps, engine.data_parallel_rank, plan.layout.dp)
    return trace(engine, steps, *shape)


def _train(rank: int, recipes: list, ranks: int) -> list[Trace]:
    plans = [plan_of(recipe, ranks) for recipe in recipes]
    return [_trace(engine_of(plan), plan, range(STEPS)) for plan in plans]


def _reference(recipe) -> Trace:
    micro = recipe.batch.micro_batch_size
    return trace(reference_of(recipe), range(STEPS), micro, GLOBAL_BATCH // micro)


def _assert_runs_are_plain(architecture: str, ranks: int, variants: list[dict]) -> None:
    recipes = [moe_recipe(architecture, **{"parallel.tensor": 2, **fields}) for fields in variants]
    expected: dict[str, Trace] = {}
    for rank, runs in enumerate(run_ranks(ranks, _train, recipes, ranks)):
        for fields, recipe, run in zip(variants, recipes, runs, strict=True):
            key = repr((recipe.optim, recipe.batch, recipe.model))
            if key not in expected:
                expected[key] = _reference(recipe)
            _assert_same(run, expected[key], (architecture, rank, fields))


def _assert_same(run: Trace, expected: Trace, name: object) -> None:
    assert worst(run.losses, expected.losses) < FP32, name
    assert worst(run.grad_norms, expected.grad_norms) < FP32, name
    assert run.rates == expected.rates, name
    assert run.evaluation == pytest.approx(expected.evaluation, rel=FP32), name
    assert run.weights.keys() == expected.weights.keys(), name
    for weight, value in run.weights.items():
        np.testing.assert_allclose(value, expected.weights[weight], rtol=0, atol=1e-5, err_msg=f"{name} {weight}")
