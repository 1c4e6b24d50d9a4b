"""Pipeline stages × data parallel × ZeRO-1 match the plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from tests.helpers.batches import GLOBAL_BATCH, VOCAB, T, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, engine_of, plain_run, plan_of, trace, worst

STEPS = 8
FP32 = 1e-5  # as in test_parity.py

OPT_350M = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "word_embed_proj_dim": 32, "ffn_dim": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": T, "do_layer_norm_before": False, "dropout": 0.0},
}
"""As `facebook/opt-350m`: the embedding is narrower than the layers, and norms come after them."""
GPT2 = {
    **{"vocab_size": VOCAB, "n_embd": 64, "n_layer": 5, "n_head": 4, "n_positions": T},
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
"""Its matrices are transposed (`Conv1D`), and have biases."""
SPLIT = {"parallel.pipeline_schedule": "zero_bubble", "parallel.pipeline_chunks": 2}
ZERO_BUBBLE = {**SPLIT, "model.config.num_hidden_layers": 5}
INTERLEAVED = {**ZERO_BUBBLE, "parallel.pipeline_schedule": "interleaved"}
CASES = [
    # pp, dp, fields
    (2, 1, {"model": {"architecture": "opt", "config": OPT_350M}, "optim.name": "sgd", "optim.lr": 0.1}),
    (2, 1, {"parallel.activation_checkpointing": "full"}),
    (2, 2, {}),
    (2, 2, {"parallel.offload_optimizer": "cpu"}),
    (4, 1, {"model.config.num_hidden_layers": 5}),
    (2, 1, INTERLEAVED),
    (2, 1, {**ZERO_BUBBLE, "parallel.activation_checkpointing": "full", "model.config.tie_word_embeddings": False}),
    (2, 1, {**SPLIT, "model": {"architecture": "gpt2", "config": GPT2}}),
    (4, 1, {**INTERLEAVED, "model.config.num_hidden_layers": 9}),
    (4, 1, {**ZERO_BUBBLE, "model.config.num_hidden_layers": 9}),
    (2, 2, {**ZERO_BUBBLE, "parallel.offload_optimizer": "cpu"}),
]


def _recipe(pp: int, dp: int, fields):
    own = {"parallel.pipeline": pp, "parallel.zero_stage": 1, "batch.micro_batch_size": GLOBAL_BATCH // dp // 4}
    return tiny_recipe(**own, **fields)


def _plan(pp: int, dp: int, fields):
    return plan_of(_recipe(pp, dp, fields), pp * dp)


def _run(engine, plan, steps: range) -> Trace:
    batch = plan.batch
    rank, dp = engine.data_parallel_rank, plan.data_parallel_size
    return trace(engine, steps, batch.micro_batch_size, batch.gradient_accumulation_steps, rank, dp)


def _train(rank: int, cases) -> list[Trace]:
    plans = [_plan(*case) for case in cases]
    return [_run(engine_of(plan), plan, range(STEPS)) for plan in plans]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_pipeline_matches_the_plain_loop(ranks):
    cases = [case for case in CASES if case[0] * case[1] == ranks]
    for results in run_ranks(ranks, _train, cases):
        for case, run in zip(cases, results, strict=True):
            plain = {key: value for key, value in case[2].items() if not key.startswith("parallel")}
            expected = plain_run(tiny_recipe(**plain), STEPS)
            assert worst(run.losses, expected.losses) < FP32, case
            assert worst(run.grad_norms, expected.grad_norms) < FP32, case
            assert run.rates == expected.rates, case
            assert run.evaluation == pytest.approx(expected.evaluation, rel=FP32), case
            assert run.weights.keys() == expected.weights.keys(), case
            for name, value in run.weights.items():
                np.testing.assert_allclose(value, expected.weights[name], rtol=0, atol=1e-5, err_msg=f"{case} {name}")


def _interrupted(rank: int, folder):
    plan = _plan(2, 1, {})
    whole = _run(engine_of(plan), plan, range(8))
    first = engine_of(plan)
    _run(first, plan, range(4))
    Saver(folder, plan, first).save(TrainerState(step=4, data="key"))
    second = engine_of(plan)
    load(newest(folder), second, plan, "key")
    return whole, _run(second, plan, range(4, 8))


def test_a_continued_pipeline_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    for whole, continued in run_ranks(2, _interrupted, tmp_path):
        assert continued.losses == whole.losses[4:]
        assert continued.grad_norms == whole.grad_norms[4:]
        assert all(np.array_equal(continued.weights[name], whole.weights[name]) for name in whole.weights)


@pytest.mark.slow
def test_bf16_stays_near_the_fp32_loop():
    """With tied weights, whose gradients bf16 keeps elsewhere; the bounds are those of test_parity.py."""
    expected = plain_run(tiny_recipe(), STEPS)
    for run in run_ranks(4, _train, [(2, 2, {"parallel.precision": "bf16"})]):
        assert worst(run[0].losses, expected.losses) < 2**-8
        assert worst(run[0].grad_norms, expected.grad_norms) < 2**-6


def _forward_passes(rank: int, recipe) -> float:
    """How often a decoder layer of this rank's stage runs for each micro-batch of a step."""
    plan = plan_of(recipe, 2)
    engine = engine_of(plan)
    calls = []
    layers = engine.module.stages[0].model.model.layers
    own = next(layer for layer in layers if next(layer.parameters(), None) is not None)
    own.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    _run(engine, plan, range(1))
    return len(calls) / plan.batch.gradient_accumulation_steps


def test_checkpointing_runs_each_layer_twice():
    """DeepSpeed's own interval would checkpoint the stage around its layers: three times. The last pass evaluates."""
    recipe = _recipe(2, 1, {"parallel.activation_checkpointing": "full"})
    assert run_ranks(2, _forward_passes, recipe) == [2 + 1, 2 + 1]
