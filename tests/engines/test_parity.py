"""Every ZeRO stage, rank count, accumulation and offload gives the run of a plain PyTorch loop.

fp32 tolerance: the orders of summation differ, each sum of n numbers by about sqrt(n)·2⁻²⁴ relative
(n = 8·32 tokens here), which Adam's division keeps at that size: 1e-5 is the project's bound for it.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from batches import GLOBAL_BATCH, step_batch, tiny_recipe
from harness import run_ranks

from llmtrain.cluster import Cluster
from llmtrain.ds_config import render
from llmtrain.engines import build_engine
from llmtrain.engines.reference import ReferenceEngine
from llmtrain.models import build_model
from llmtrain.plan import resolve

STEPS = 20
FP32 = 1e-5


def _offloads(stage: int) -> list[dict[str, str]]:
    choices = [{}]
    if stage >= 1:
        choices.append({"parallel.offload_optimizer": "cpu"})
    if stage == 3:
        choices.append({"parallel.offload_optimizer": "cpu", "parallel.offload_param": "cpu"})
    return choices


def _recipe(stage: int, ranks: int, accumulation: int, **fields):
    micro_batch = GLOBAL_BATCH // (ranks * accumulation)
    return tiny_recipe(**{"parallel.zero_stage": stage, "batch.micro_batch_size": micro_batch, **fields})


def _train(rank: int, recipes: list, ranks: int) -> list:
    """Runs several recipes one after the other in one process group."""
    return [_train_one(rank, recipe, ranks) for recipe in recipes]


def _train_one(rank: int, recipe, ranks: int):
    plan = resolve(recipe, Cluster(devices_per_node=ranks))
    engine = build_engine(plan, render(plan), torch.device("cpu"))
    batch = plan.batch
    trace = []
    for step in range(STEPS):
        one = step_batch(step, batch.micro_batch_size, batch.gradient_accumulation_steps, rank, ranks)
        result = engine.train_step(one)
        trace.append((result.loss.item(), result.grad_norm.item(), result.lr))
    evaluation = engine.eval_step(
        step_batch(999, batch.micro_batch_size, batch.gradient_accumulation_steps, rank, ranks)
    )
    # Numpy, since a tensor would travel through shared memory that dies with its process.
    weights = {name: tensor.float().numpy() for name, tensor in engine.named_weights()}
    return trace, evaluation.item(), weights


def _reference(recipe, model_dtype=torch.float32):
    model = build_model(recipe, model_dtype, torch.device("cpu"))
    engine = ReferenceEngine(model, recipe)
    trace = []
    for step in range(STEPS):
        result = engine.train_step(step_batch(step, 1, GLOBAL_BATCH))
        trace.append((result.loss.item(), result.grad_norm.item(), result.lr))
    evaluation = engine.eval_step(step_batch(999, 1, GLOBAL_BATCH)).item()
    return trace, evaluation, {name: tensor.float().numpy() for name, tensor in engine.named_weights()}


@pytest.fixture(scope="module")
def reference():
    return _reference(tiny_recipe())


def _assert_same_run(run, reference, tolerance: float) -> None:
    (trace, evaluation, weights), (expected, expected_evaluation, expected_weights) = run, reference
    for step, (ours, theirs) in enumerate(zip(trace, expected, strict=True)):
        assert ours[0] == pytest.approx(theirs[0], rel=tolerance), f"loss of step {step}"
        assert ours[1] == pytest.approx(theirs[1], rel=tolerance), f"gradient norm of step {step}"
        assert ours[2] == theirs[2], f"learning rate of step {step}"
    assert evaluation == pytest.approx(expected_evaluation, rel=tolerance)
    assert weights.keys() == expected_weights.keys()


@pytest.mark.parametrize("ranks", [1, 2])
def test_fp32_is_the_plain_loop(ranks, reference):
    cases = [
        (stage, accumulation, offload)
        for stage, accumulation in itertools.product(range(4), (1, 4))
        for offload in _offloads(stage)
    ]
    recipes = [_recipe(stage, ranks, accumulation, **offload) for stage, accumulation, offload in cases]
    results = run_ranks(ranks, _train, recipes, ranks)
    for index, case in enumerate(cases):
        for rank in range(ranks):
            try:
                _assert_same_run(results[rank][index], reference, FP32)
            except AssertionError as error:
                raise AssertionError(f"ZeRO-{case[0]}, accumulation {case[1]}, {case[2]}, rank {rank}") from error
