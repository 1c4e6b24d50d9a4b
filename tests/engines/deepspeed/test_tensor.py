"""Tensor parallelism, at every ZeRO stage and with data parallelism, matches the plain loop."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.models import build_model
from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.moe import GPT_OSS
from tests.helpers.traces import Trace, engine_of, plain_run, plan_of, trace, worst

ROOT = Path(__file__).parents[3]
STEPS = 4
FP32 = 1e-5
"""As in `test_parity.py`: sums in another order."""
SGD = {"optim.name": "sgd", "optim.lr": 0.1}
"""Adam forgets the scale of a gradient; only here does a wrong clipping show in the weights."""
UNTIED = {"model.config.tie_word_embeddings": False, "model.config.attention_bias": True}
UNTIED |= {"model.config.pad_token_id": 200}  # a row of zeros, on the last rank
OFFLOAD = {"parallel.offload_optimizer": "cpu"}
QWEN = {"model.architecture": "qwen3", "model.config.head_dim": 16}
"""Norms over each head, whose gradients the ranks have to add."""
GPT2 = {
    "model.architecture": "gpt2",
    "model.config": {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}
BLOOM = {
    "model.architecture": "bloom",
    "model.attention": "eager",
    "model.config": {"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4},
}
DROPOUT = {"model.config.attention_dropout": 0.1}
CPU = torch.device("cpu")


def _recipe(tensor: int, dp: int, stage: int, accumulation: int, **fields):
    degrees = {"parallel.tensor": tensor, "parallel.zero_stage": stage}
    return tiny_recipe(
        **{**degrees, "batch.micro_batch_size": GLOBAL_BATCH // (dp * accumulation), "model.config.vocab_size": 256},
        **fields,
    )


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


def _reference(**fields) -> Trace:
    return plain_run(tiny_recipe(**fields), STEPS)


def _compare(cases, ranks) -> None:
    """Trains each case, (fields, recipe), and compares every rank with the plain loop under the same fields."""
    by_rank = run_ranks(ranks, _train, [recipe for _, recipe in cases], ranks)
    references = {}
    for (fields, recipe), *runs in zip(cases, *by_rank, strict=True):
        key = repr(fields)
        expected = references[key] = references.get(key) or _reference(**fields)
        for run in runs:
            name = f"{recipe.parallel} {fields}"
            assert worst(run.losses, expected.losses) < FP32, name
            assert worst(run.grad_norms, expected.grad_norms) < FP32, name
            assert run.rates == expected.rates, name
            assert run.evaluation == pytest.approx(expected.evaluation, rel=FP32), name
            assert run.weights.keys() == expected.weights.keys(), name
            for weight, value in run.weights.items():
                # As in `test_parity.py`: Adam divides by what may be near zero.
                np.testing.assert_allclose(value, expected.weights[weight], rtol=0, atol=1e-5, err_msg=name)


def test_two_ranks_are_the_plain_loop_at_every_stage():
    cases = [(SGD | UNTIED, stage, 4) for stage in range(4)] + [(SGD | QWEN, 2, 1)]
    _compare([(fields, _recipe(2, 1, stage, steps, **fields)) for fields, stage, steps in cases], 2)


@pytest.mark.breadth
def test_norms_of_heads_and_an_offloaded_optimizer_match_the_plain_loop():
    cases = [(SGD | QWEN, 0), (SGD | QWEN, 3), (SGD | UNTIED | OFFLOAD, 2)]
    _compare([(fields, _recipe(2, 1, stage, 1, **fields)) for fields, stage in cases], 2)


@pytest.mark.breadth
def test_sums_of_experts_are_delayed_to_the_end_of_their_block():
    """The router's loss is a product of means over a micro-batch, so they are those of the plain loop."""
    fields = SGD | MIXTRAL
    again = fields | {"parallel.activation_checkpointing": "full"}
    cases = [(fields, _recipe(2, 1, stage, GLOBAL_BATCH, **fields)) for stage in (0, 2, 3)]
    _compare([*cases, (fields, _recipe(2, 1, 1, GLOBAL_BATCH, **again))], 2)


@pytest.mark.breadth
def test_matrices_of_three_projections_alibi_and_biases_of_experts_match_the_plain_loop():
    """Those of GPT-2 are transposed."""
    experts = {f"model.{name}": value for name, value in GPT_OSS.items()}
    cases = [(GPT2, 1, 1), (GPT2, 3, 1), (BLOOM, 3, 1)]
    cases += [(experts, stage, GLOBAL_BATCH) for stage in (2, 3)]
    recipes = ((SGD | fields, stage, steps) for fields, stage, steps in cases)
    _compare([(fields, _recipe(2, 1, stage, steps, **fields)) for fields, stage, steps in recipes], 2)


@pytest.mark.breadth
def test_adam_tied_weights_and_checkpointing_match_the_plain_loop():
    fields = {"parallel.activation_checkpointing": "full"}
    _compare([(fields, _recipe(2, 1, stage, 2, **fields)) for stage in (0, 1, 3)], 2)


@pytest.mark.slow
def test_groups_of_two_and_of_four_match_the_plain_loop():
    more_heads = SGD | {"model.config.num_key_value_heads": 4}
    cases = [(SGD, _recipe(2, 2, stage, 2, **SGD)) for stage in (0, 1, 3)]
    # Other degrees in the same processes: DeepSpeed would keep the first one's groups.
    _compare([*cases, (more_heads, _recipe(4, 1, 1, 2, **more_heads)), (SGD, _recipe(1, 4, 1, 2, **SGD))], 4)


@pytest.mark.slow
def test_bf16_stays_near_the_fp32_loop():
    recipes = [_recipe(2, 1, stage, 2, **{"parallel.precision": "bf16"}) for stage in (1, 2, 3)]
    expected = _reference()
    for run in run_ranks(2, _train, recipes, 2)[0]:
        # As in `test_parity.py`: a unit in the last place of the loss, and four for a norm of rounded gradients.
        assert worst(run.losses, expected.losses) < 2**-8
        assert worst(run.grad_norms, expected.grad_norms) < 2**-6


def test_initial_weights_are_those_of_the_whole_model_bit_for_bit():
    recipes = [_recipe(2, 1, stage, 1, **fields) for stage in (0, 3) for fields in (UNTIED, QWEN)]
    for recipe, weights in zip(recipes, run_ranks(2, _initial, recipes, 2)[1], strict=True):
        whole = {name: value.detach().numpy() for name, value in _whole(recipe).named_parameters()}
        assert weights.keys() == whole.keys()
        assert all(np.array_equal(weights[name], whole[name]) for name in whole)


def _whole(recipe):
    return build_model(recipe, torch.float32, CPU)


def _initial(rank: int, recipes, ranks: int):
    engines = (engine_of(plan_of(recipe, ranks)) for recipe in recipes)
    return [{name: value.numpy() for name, value in engine.named_weights()} for engine in engines]


@pytest.mark.slow
def test_pretrained_weights_are_sliced_and_joined_again(tmp_path):
    saved = _whole(tiny_recipe(**UNTIED))
    saved.save_pretrained(tmp_path)
    fields = {"model.architecture": None, "model.pretrained": str(tmp_path), "model.config": {}}
    recipes = [tiny_recipe(**fields, **{"parallel.tensor": 2, "parallel.zero_stage": stage}) for stage in (2, 3)]
    for weights in itertools.chain(*run_ranks(4, _initial, recipes, 4)):
        assert all(np.array_equal(weights[name], value.detach().numpy()) for name, value in saved.named_parameters())


def _interrupted(rank: int, ranks: int, cases, folder):
    found = []
    for index, fields in enumerate(cases):
        plan = plan_of(_recipe(2, ranks // 2, fields["parallel.zero_stage"], 1, **DROPOUT).with_(**fields), ranks)
        torch.manual_seed(rank // 2)
        whole = _trace(engine_of(plan), plan, range(STEPS))
        torch.manual_seed(rank // 2)
        first = engine_of(plan)
        _trace(first, plan, range(STEPS // 2))
        Saver(folder / str(index), plan, first).save(TrainerState(step=STEPS // 2, data="key"))
        torch.manual_seed(999)
        second = engine_of(plan)
        load(newest(folder / str(index)), second, plan, "key")
        found.append((whole, _trace(second, plan, range(STEPS // 2, STEPS))))
    return found


def test_a_continued_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    cases = [{"parallel.zero_stage": stage} for stage in (0, 3)]
    cases.append({"parallel.zero_stage": 2, "parallel.precision": "bf16"})
    by_rank = run_ranks(2, _interrupted, 2, cases, tmp_path)
    for results in by_rank:
        for case, (whole, continued) in zip(cases, results, strict=True):
            assert continued.losses == whole.losses[STEPS // 2 :], case
            assert continued.grad_norms == whole.grad_norms[STEPS // 2 :], case
            assert all(np.array_equal(continued.weights[name], whole.weights[name]) for name in whole.weights), case


def _with_dropout(rank: int, seeds) -> Trace:
    config = dict(tiny_recipe().model.config) | {"resid_pdrop": 0.2, "embd_pdrop": 0.2}
    recipe = _recipe(2, 1, 1, 1).with_(**{"model.architecture": "phi", "model.config": config})
    plan = plan_of(recipe, 2)
    engine = engine_of(plan)
    torch.manual_seed(seeds[rank])
    return _trace(engine, plan, range(2))


@pytest.mark.breadth
def test_tensor_parallel_ranks_with_dropout_stay_equal():
    same, other = (run_ranks(2, _with_dropout, seeds) for seeds in ((5, 5), (5, 6)))
    assert same[0].losses == same[1].losses
    assert all(np.array_equal(value, same[1].weights[name]) for name, value in same[0].weights.items())
    assert same[0].losses != other[0].losses
