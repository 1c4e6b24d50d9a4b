"""Trains recipes of `batches` on an engine, for tests that compare runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmtrain.engines import Engine, build_engine
from llmtrain.engines.state.save_load import CheckpointReader
from llmtrain.models import model_configuration
from llmtrain.models.hub_names import empty_model
from llmtrain.models.precision import weight_dtype
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.plan.rules import resolve
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import GLOBAL_BATCH, step_batch
from tests.helpers.reference_run import ReferenceRun


@dataclass
class Trace:
    """What a run computed."""

    losses: list[float]
    grad_norms: list[float]
    rates: list[float]
    evaluation: float
    weights: dict[str, NDArray]
    """Numpy arrays: a tensor would be passed through shared memory, which ends with its process."""


def assert_same_bits(ours: Trace, theirs: Trace, name: str) -> None:
    """Asserts that two runs computed the same bits. name: of the case."""
    for field in ("losses", "grad_norms", "evaluation"):
        assert getattr(ours, field) == getattr(theirs, field), f"{name}: {field}"
    for weight, value in ours.weights.items():
        np.testing.assert_array_equal(value, theirs.weights[weight], err_msg=f"{name} {weight}")


def plan_of(recipe: Recipe, ranks: int) -> Plan:
    return resolve(recipe, Cluster(devices_per_node=ranks))


def engine_of(plan: Plan) -> Engine:
    return build_engine(plan, render(plan), torch.device("cpu"))


def reference_of(recipe: Recipe) -> ReferenceRun:
    return ReferenceRun(recipe)


def trace(engine, steps: range, micro_batch: int, accumulation: int, rank: int = 0, ranks: int = 1) -> Trace:
    """Trains the steps, then evaluates."""

    def batch(step: int):
        return step_batch(step, micro_batch, accumulation, rank, ranks)

    results = [engine.train_step(batch(step)) for step in steps]
    evaluation = engine.eval_step(batch(999)).item()
    return Trace(
        losses=[result.loss.item() for result in results],
        grad_norms=[result.grad_norm.item() for result in results],
        rates=[result.lr for result in results],
        evaluation=evaluation,
        weights={name: tensor.float().numpy().copy() for name, tensor in engine.named_weights()},
    )


_plain_runs: dict[tuple[str, int, int], Trace] = {}


def plain_run(recipe: Recipe, steps: int, micro_batch: int = 1) -> Trace:
    """Returns the run of the plain loop, computed once per process: many cases and ranks are compared with it."""
    key = repr(recipe), steps, micro_batch
    if key not in _plain_runs:
        _plain_runs[key] = trace(reference_of(recipe), range(steps), micro_batch, GLOBAL_BATCH // micro_batch)
    return _plain_runs[key]


def trace_plan(plan: Plan, steps: int, rank: int) -> Trace:
    """Returns the run of a plan on one rank, from its first step."""
    batch = plan.batch
    return trace(
        engine_of(plan),
        range(steps),
        batch.micro_batch_size,
        batch.gradient_accumulation_steps,
        rank,
        plan.data_parallel_size,
    )


def saved_weights(checkpoint: Path, plan: Plan) -> dict[str, torch.Tensor]:
    """Returns the weights of a checkpoint, in the data type of the plan's forward pass."""
    dtype = weight_dtype(plan.recipe.parallel.precision)
    shapes = empty_model(model_configuration(plan.recipe), dtype).state_dict()
    source = CheckpointReader(checkpoint)
    return {name: source.whole(name).view(shapes[name].shape).to(shapes[name].dtype) for name in source.shards}


def worst(ours: list[float], theirs: list[float]) -> float:
    """Returns the largest relative difference."""
    return max(abs(a - b) / (abs(b) or 1) for a, b in zip(ours, theirs, strict=True))  # a norm of nothing is 0


def assert_same(run: Trace, expected: Trace, name: object, tolerance: float = 1e-5) -> None:
    """Checks that two fp32 runs differ only by the rounding of sums in another order, as derived in `test_parity`."""
    assert worst(run.losses, expected.losses) < tolerance, name
    assert worst(run.grad_norms, expected.grad_norms) < tolerance, name
    assert run.rates == expected.rates, name
    assert run.evaluation == pytest.approx(expected.evaluation, rel=tolerance), name
    assert run.weights.keys() == expected.weights.keys(), name
    for weight, value in run.weights.items():
        np.testing.assert_allclose(value, expected.weights[weight], rtol=0, atol=tolerance, err_msg=f"{name} {weight}")
