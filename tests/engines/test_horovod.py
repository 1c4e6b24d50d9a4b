"""Horovod matches the plain loop."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.recipe import Recipe
from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, step_batch, tiny_recipe
from tests.helpers.continued_texts import check_texts
from tests.helpers.harness import run_ranks
from tests.helpers.own_passes import traces_of_both_loops
from tests.helpers.traces import Trace, assert_same_bits, engine_of, plain_run, plan_of, trace, trace_plan, worst

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None,
    reason="Horovod is not installed; scripts/install_horovod.sh builds and installs it",
)

STEPS = 8
FP32 = 1e-5
"""The bound of the project for fp32; see test_parity.py."""

SGD = {"optim.name": "sgd", "optim.lr": 0.1}
VARIANTS = (
    {},
    SGD,
    {"optim.clip_grad_norm": 0.0},
    {"optim.name": "adam", "parallel.activation_checkpointing": "full"},
    {**SGD, "model.config.tie_word_embeddings": False},
    {**SGD, "parallel.precision": "autocast_bf16"},
    {**SGD, "parallel.precision": "bf16"},
)


def _recipe(ranks: int, accumulation: int, **fields) -> Recipe:
    size = {"batch.micro_batch_size": GLOBAL_BATCH // (ranks * accumulation)}
    return tiny_recipe(**{"parallel.backend": "horovod", **size, **fields})


def _reference(recipe: Recipe, micro_batch: int = 1) -> Trace:
    return plain_run(recipe, STEPS, micro_batch)


def _train(rank: int, recipes: list[Recipe], ranks: int) -> list[Trace]:
    return [trace_plan(plan_of(recipe, ranks), STEPS, rank) for recipe in recipes]


def _passes(rank: int, recipe: Recipe) -> tuple[Trace, Trace]:
    return traces_of_both_loops(plan_of(recipe, 2))


def test_own_passes_compute_the_same_bits():
    for ours, theirs in run_ranks(2, _passes, _recipe(2, 2)):
        assert_same_bits(ours, theirs, "horovod")


@pytest.mark.parametrize("ranks", [1, 2])
def test_horovod_matches_the_plain_loop(ranks):
    cases = [(fields, accumulation) for fields in VARIANTS for accumulation in (1, 4)]
    by_rank = run_ranks(ranks, _train, [_recipe(ranks, steps, **fields) for fields, steps in cases], ranks)
    references = [_reference(tiny_recipe(**fields)) for fields in VARIANTS]
    for rank, runs in enumerate(by_rank):
        for (fields, accumulation), run in zip(cases, runs, strict=True):
            name = f"{fields}, accumulation {accumulation}, rank {rank}"
            expected = references[VARIANTS.index(fields)]
            # Products in bf16 round each operand to 8 bits, and passes of another size add them in another order.
            tolerance = 2**-8 if "parallel.precision" in fields else FP32
            assert worst(run.losses, expected.losses) < tolerance, name
            assert worst(run.grad_norms, expected.grad_norms) < 4 * tolerance, name
            assert run.rates == expected.rates, name
            assert run.evaluation == pytest.approx(expected.evaluation, rel=tolerance), name
            assert run.weights.keys() == expected.weights.keys(), name
            if tolerance == FP32:
                for weight, value in run.weights.items():
                    # Where a gradient is near zero Adam moves a weight by its rounding; see test_parity.py.
                    np.testing.assert_allclose(value, expected.weights[weight], rtol=0, atol=1e-5, err_msg=name)


def test_the_load_balance_loss_is_a_mean_over_ranks():
    fields = {**MIXTRAL, **SGD}
    run = run_ranks(2, _train, [_recipe(2, 2, **fields)], 2)[0][0]
    # The same micro-batches, since the loss of a router is a mean within each.
    expected = _reference(tiny_recipe(**fields), micro_batch=2)
    assert worst(run.losses, expected.losses) < FP32
    assert worst(run.grad_norms, expected.grad_norms) < FP32


def test_ranks_hold_the_same_weights():
    first, second = run_ranks(2, _train, [_recipe(2, 2, **{"parallel.precision": "bf16"})], 2)
    for name, value in first[0].weights.items():
        np.testing.assert_array_equal(value, second[0].weights[name], err_msg=name)


def _interrupted(rank: int, ranks: int, folder: Path, precision: str) -> tuple[Trace, Trace]:
    """An uninterrupted run, and the second half of one that another engine continues."""
    dropout = {"model.config.attention_dropout": 0.1}  # a generator that is not restored shows
    plan = plan_of(_recipe(ranks, 2, **dropout, **{"parallel.precision": precision}), ranks)
    shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps, rank, ranks)
    torch.manual_seed(rank)
    whole = trace_plan(plan, STEPS, rank)
    torch.manual_seed(rank)
    first = engine_of(plan)
    for step in range(STEPS // 2):
        first.train_step(step_batch(step, *shape))
    Saver(folder, plan, first).save(TrainerState(step=STEPS // 2, samples=STEPS // 2 * GLOBAL_BATCH, data="key"))
    torch.manual_seed(999)
    second = engine_of(plan)
    load(newest(folder), second, plan, "key")
    return whole, trace(second, range(STEPS // 2, STEPS), *shape)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_is_saved_and_loaded_continues_bit_for_bit(tmp_path, precision):
    for whole, continued in run_ranks(2, _interrupted, 2, tmp_path, precision):
        assert continued.losses == whole.losses[STEPS // 2 :]
        assert continued.grad_norms == whole.grad_norms[STEPS // 2 :]
        assert continued.evaluation == whole.evaluation
        for name, value in whole.weights.items():
            np.testing.assert_array_equal(continued.weights[name], value, err_msg=name)


def test_samples_match_the_weights_and_do_not_change_training(tmp_path):
    check_texts(2, {"horovod": {"parallel.backend": "horovod"}}, tmp_path)
