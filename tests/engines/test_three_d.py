"""Tensor parallel ranks within pipeline stages, × data parallel × ZeRO-1, give the run of a plain PyTorch loop."""

from __future__ import annotations

import numpy as np
import pytest
from batches import GLOBAL_BATCH, tiny_recipe
from harness import run_ranks
from traces import Trace, engine_of, plan_of, reference_of, trace, worst

STEPS = 10
FP32 = 1e-5  # as in test_parity.py
LAYOUT = {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.zero_stage": 1}
UNTIED = {"model.config.tie_word_embeddings": False}
SGD = {"optim.name": "sgd", "optim.lr": 0.1}
QWEN3 = {"model.architecture": "qwen3", "model.config.head_dim": 16}
MIXTRAL = {
    "model.architecture": "mixtral",
    "model.config.num_local_experts": 4,
    "model.config.tie_word_embeddings": False,
}


def _plan(dp: int, fields):
    own = {**LAYOUT, "batch.micro_batch_size": GLOBAL_BATCH // dp // 4}
    return plan_of(tiny_recipe(**own, **fields), 4 * dp)


def _run(engine, plan, steps: range) -> Trace:
    batch = plan.batch
    rank, dp = engine.data_parallel_rank, plan.layout.dp
    return trace(engine, steps, batch.micro_batch_size, batch.gradient_accumulation_steps, rank, dp)


def _train(rank: int, dp: int, cases) -> list[Trace]:
    plans = [_plan(dp, case) for case in cases]
    return [_run(engine_of(plan), plan, range(STEPS)) for plan in plans]


def _check(results, cases) -> None:
    for by_case in results:
        for case, run in zip(cases, by_case, strict=True):
            plain = {key: value for key, value in case.items() if not key.startswith("parallel")}
            expected = trace(reference_of(tiny_recipe(**plain)), range(STEPS), 1, GLOBAL_BATCH)
            print(case, worst(run.losses, expected.losses), worst(run.grad_norms, expected.grad_norms))
            assert worst(run.losses, expected.losses) < FP32, case
            assert worst(run.grad_norms, expected.grad_norms) < FP32, case
            assert run.rates == expected.rates, case
            assert run.evaluation == pytest.approx(expected.evaluation, rel=FP32), case
            assert run.weights.keys() == expected.weights.keys(), case
            for name, value in run.weights.items():
                np.testing.assert_allclose(value, expected.weights[name], rtol=0, atol=1e-5, err_msg=f"{case} {name}")


def test_three_dimensions_are_the_plain_loop():
    """Adam, and SGD, which shows a wrong clipping; tied and untied; norms of heads, biases and experts."""
    cases = [{}, SGD, {**SGD, **UNTIED}, {**SGD, **QWEN3}]
    _check(run_ranks(4, _train, 1, cases), cases)
