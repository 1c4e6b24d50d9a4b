"""A run that is saved and loaded continues bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from tests.helpers.batches import GLOBAL_BATCH, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of, trace, trace_plan

STOP, END = 3, 5

CASES = [
    (stage, precision)
    for stage, precision in itertools.product(range(4), ("fp32", "bf16"))
    if (stage, precision) != (0, "bf16")  # refused: DeepSpeed's first update is wrong there
]


COMPILED = {"kernels.blocks": "compiled", "kernels.loss": "compiled"}


def _plan(stage: int, precision: str, ranks: int, kernels: dict):
    fields = {"parallel.zero_stage": stage, "parallel.precision": precision} | kernels
    # Dropout, so that a generator that is not restored shows.
    dropout = {"model.config.attention_dropout": 0.1}
    return plan_of(tiny_recipe(**fields, **dropout, **{"batch.micro_batch_size": GLOBAL_BATCH // ranks}), ranks)


def _interrupted(rank: int, ranks: int, folder, cases=CASES, kernels=None):
    """Loss after loss of an uninterrupted run, and of one that another engine continues."""
    import torch

    found = []
    for index, (stage, precision) in enumerate(cases):
        plan = _plan(stage, precision, ranks, kernels or {})
        torch.manual_seed(rank)
        whole = trace_plan(plan, END, rank)
        torch.manual_seed(rank)
        shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps, rank, ranks)
        checkpoints = folder / str(index)
        first = engine_of(plan)
        for step in range(STOP):
            _step(first, step, shape)
        Saver(checkpoints, plan, first).save(TrainerState(step=STOP, samples=STOP * GLOBAL_BATCH, data="key"))
        torch.manual_seed(999)
        second = engine_of(plan)
        state = load(newest(checkpoints), second, plan, "key")
        assert (state.step, state.samples) == (STOP, STOP * GLOBAL_BATCH)
        found.append((whole, trace(second, range(STOP, END), *shape)))
    return found


def _step(engine, step, shape):
    from tests.helpers.batches import step_batch

    engine.train_step(step_batch(step, *shape))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.breadth), 2])
def test_a_continued_run_equals_the_uninterrupted_one_bit_for_bit(ranks, tmp_path):
    _compare(run_ranks(ranks, _interrupted, ranks, tmp_path), CASES)


@pytest.mark.breadth
def test_compiled_kernels_continue_bit_for_bit(tmp_path):
    cases = [(3, "bf16")]
    _compare(run_ranks(2, _interrupted, 2, tmp_path, cases, COMPILED), cases)


def _compare(everyone, cases):
    for results in everyone:
        for case, (whole, continued) in zip(cases, results, strict=True):
            assert continued.losses == whole.losses[STOP:], case
            assert continued.grad_norms == whole.grad_norms[STOP:], case
            assert continued.rates == whole.rates[STOP:], case
            assert all(np.array_equal(continued.weights[name], whole.weights[name]) for name in whole.weights), case
