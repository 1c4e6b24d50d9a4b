"""Tensor parallel ranks within pipeline stages, × data parallel × ZeRO-1, match the plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.export import export
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import begin, load
from tests.helpers.batches import GLOBAL_BATCH, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, assert_same, engine_of, plain_run, plan_of, trace, worst

STEPS = 6
FP32 = 1e-5  # as in test_parity.py
LAYOUT = {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.zero_stage": 1}
# Adam forgets the scale of a gradient; only with SGD does a wrong clipping show in the weights.
SGD = {"optim.name": "sgd", "optim.lr": 0.1}
UNTIED = {"model.config.tie_word_embeddings": False}
HEAD_NORMS = {"model.architecture": "qwen3", "model.config.head_dim": 16}
BIASES = {"model.architecture": "qwen2"}
BIASED = {"model.architecture": "starcoder2", "model.config.residual_dropout": 0.0}
"""Biases that are added to sums, each rank for its own tokens."""
EXPERTS = {"model.architecture": "mixtral", "model.config.num_local_experts": 4, **UNTIED}
DROPOUT = {"model.architecture": "starcoder2", "model.config.residual_dropout": 0.2}


def _plan(dp: int, fields):
    own = {**LAYOUT, "batch.micro_batch_size": GLOBAL_BATCH // dp // 4}
    return plan_of(tiny_recipe(**own, **fields), 4 * dp)


def _run(engine, plan, steps: range) -> Trace:
    batch = plan.batch
    rank, dp = engine.data_parallel_rank, plan.data_parallel_size
    return trace(engine, steps, batch.micro_batch_size, batch.gradient_accumulation_steps, rank, dp)


def _train(rank: int, dp: int, cases) -> list[Trace]:
    plans = [_plan(dp, case) for case in cases]
    return [_run(engine_of(plan), plan, range(STEPS)) for plan in plans]


def _compare(by_rank: list[list[Trace]], cases) -> None:
    for results in by_rank:
        for case, run in zip(cases, results, strict=True):
            plain = {key: value for key, value in case.items() if not key.startswith("parallel")}
            expected = plain_run(tiny_recipe(**plain), STEPS)
            assert_same(run, expected, case)


FP32_CASES = [{}, {**SGD, **HEAD_NORMS}]
BF16 = {"parallel.precision": "bf16"}


@pytest.fixture(scope="module")
def trained():
    return run_ranks(4, _train, 1, [*FP32_CASES, BF16])


@pytest.mark.slow
def test_stages_of_two_ranks_match_the_plain_loop(trained):
    _compare([results[:-1] for results in trained], FP32_CASES)


@pytest.mark.slow
def test_bf16_stays_near_the_fp32_loop(trained):
    """With tied weights, whose gradients bf16 keeps elsewhere; the bounds are those of test_parity.py."""
    expected = plain_run(tiny_recipe(), STEPS)
    for *_, run in trained:
        assert worst(run.losses, expected.losses) < 2**-8
        assert worst(run.grad_norms, expected.grad_norms) < 2**-6


@pytest.mark.breadth
def test_other_families_and_options_match_the_plain_loop():
    checkpointing = {"parallel.activation_checkpointing": "full"}
    offload = {"parallel.offload_optimizer": "cpu"}
    cases = [SGD, {**SGD, **UNTIED}, {**SGD, **BIASES}, {**SGD, **EXPERTS}, checkpointing, {**SGD, **offload}]
    _compare(run_ranks(4, _train, 1, cases), cases)


@pytest.mark.breadth
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_other_schedules_match_the_plain_loop(schedule):
    stages = {"parallel.pipeline_schedule": schedule, "parallel.pipeline_chunks": 2}
    stages |= {"model.config.num_hidden_layers": 4}
    cases = [stages | SGD | UNTIED, stages | SGD | BIASED]
    _compare(run_ranks(4, _train, 1, cases), cases)


@pytest.mark.breadth
def test_data_parallel_replicas_match_the_plain_loop():
    cases = [{}, SGD]
    _compare(run_ranks(8, _train, 2, cases, timeout=500), cases)


def _interrupted(rank: int, folder):
    """The seed of this rank; an uninterrupted run; what another had saved, and how a third went on."""
    plan = _plan(1, DROPOUT)
    seed = _seed()
    torch.manual_seed(rank // 2)  # as a worker does: tensor parallel ranks drop alike
    whole = _run(engine_of(plan), plan, range(6))
    torch.manual_seed(rank // 2)
    first = engine_of(plan)
    _run_without_evaluation(first, plan, range(3))
    Saver(folder, plan, first).save(TrainerState(step=3, data="key"))
    saved = {name: weight.numpy() for name, weight in first.named_weights()}
    torch.manual_seed(999)
    second = engine_of(plan)
    load(newest(folder), second, plan, "key")
    return seed, whole, saved, _run(second, plan, range(3, 6))


def _seed() -> int:
    begin(_plan(1, {}), "key")
    return torch.initial_seed()


def _run_without_evaluation(engine, plan, steps: range) -> None:
    from tests.helpers.batches import step_batch

    for step in steps:
        engine.train_step(step_batch(step, plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupted")
    return folder, run_ranks(4, _interrupted, folder)


def test_a_continued_run_equals_the_uninterrupted_one_bit_for_bit(interrupted):
    for _, whole, _, continued in interrupted[1]:
        assert continued.losses == whole.losses[3:]
        assert continued.grad_norms == whole.grad_norms[3:]
        assert all(np.array_equal(continued.weights[name], whole.weights[name]) for name in whole.weights)


def test_tensor_parallel_ranks_of_a_stage_draw_the_same_numbers(interrupted):
    seed = tiny_recipe().train.seed
    assert [drawn for drawn, *_ in interrupted[1]] == [seed, seed, seed + 1, seed + 1]


def test_all_ranks_hold_the_same_weights_in_spite_of_dropout(interrupted):
    """What tensor parallel ranks hold whole (norms, biases) each yields from its own copy."""
    first, *others = [whole.weights for _, whole, _, _ in interrupted[1]]
    for weights in others:
        assert all(np.array_equal(weights[name], first[name]) for name in first)


def test_exported_weights_equal_the_engines_bit_for_bit(interrupted, tmp_path):
    folder, results = interrupted
    inner = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(tmp_path / "tokenizer")
    export(newest(folder), tmp_path / "tokenizer", tmp_path / "out")
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    saved = results[0][2]
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], torch.from_numpy(saved[name])) for name in saved)
