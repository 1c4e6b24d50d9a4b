"""DistributedDataParallel, FSDP2 and DeepSpeed under Accelerate match the plain loop."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
from torch.distributed.tensor import DTensor

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.errors import RecipeError
from llmtrain.models import build_model
from llmtrain.plan import installed
from llmtrain.plan.draft import Draft
from llmtrain.plan.ds_config import render
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.installed import check_runnable
from llmtrain.plan.rules import assemble, broken, resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import GLOBAL_BATCH, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.reference_run import ReferenceRun
from tests.helpers.traces import (
    Trace,
    engine_of,
    plain_run,
    plan_of,
    reference_of,
    saved_weights,
    trace,
    trace_plan,
    worst,
)

STEPS = 6
FP32 = 1e-5  # as in test_parity.py

SHARDED = [("fsdp2", 3), ("fsdp2", 2)]
CASES = [("ddp", 0), *SHARDED, *(("deepspeed", stage) for stage in range(4))]

SGD = {"optim.name": "sgd", "optim.lr": 0.1}  # Adam cancels the scale of a gradient, which hides wrong clipping
VARIANTS = (
    {"model.config.tie_word_embeddings": False, "optim.clip_grad_norm": 0.0},
    {"parallel.activation_checkpointing": "full"},
)
MOE = {
    "model.architecture": "qwen3_moe",
    "model.config": {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
}


def _recipe(strategy: str, stage: int, ranks: int, accumulation: int = 2, **fields):
    own = {"parallel.backend": "accelerate", "parallel.accelerate": strategy, "parallel.zero_stage": stage}
    return tiny_recipe(**{**own, "batch.micro_batch_size": GLOBAL_BATCH // (ranks * accumulation), **fields})


def _train(rank: int, recipes, ranks: int) -> list[Trace]:
    return [trace_plan(plan_of(recipe, ranks), STEPS, rank) for recipe in recipes]


def _reference(**fields) -> Trace:
    plain = {key: value for key, value in fields.items() if key != "parallel.activation_checkpointing"}
    return plain_run(tiny_recipe(**plain), STEPS)


def _assert_same(run: Trace, expected: Trace, case) -> None:
    assert worst(run.losses, expected.losses) < FP32, case
    assert worst(run.grad_norms, expected.grad_norms) < FP32, case
    assert run.rates == expected.rates, case
    assert run.evaluation == pytest.approx(expected.evaluation, rel=FP32), case
    assert run.weights.keys() == expected.weights.keys(), case
    for name, value in run.weights.items():
        np.testing.assert_allclose(value, expected.weights[name], rtol=0, atol=1e-5, err_msg=f"{case} {name}")


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [pytest.param(1, SGD, marks=pytest.mark.breadth), (2, SGD), pytest.param(2, {}, marks=pytest.mark.breadth)],
    ids=["1-sgd", "2-sgd", "2-adamw"],
)
def test_fp32_matches_the_plain_loop(ranks, fields):
    """Embeddings are tied, weights decay by group, clipping bites."""
    expected = _reference(**fields)
    for results in run_ranks(ranks, _train, [_recipe(*case, ranks, **fields) for case in CASES], ranks):
        for case, run in zip(CASES, results, strict=True):
            _assert_same(run, expected, case)


@pytest.mark.breadth
def test_untied_unclipped_and_checkpointed_runs_match_the_plain_loop():
    cases = [(case, fields) for fields in VARIANTS for case in (("ddp", 0), ("fsdp2", 3), ("deepspeed", 0))]
    runs = run_ranks(2, _train, [_recipe(*case, 2, **fields) for case, fields in cases], 2)[0]
    for (case, fields), run in zip(cases, runs, strict=True):
        _assert_same(run, _reference(**fields), (case, fields))


@pytest.mark.slow
def test_accumulation_makes_no_difference():
    expected = _reference(**SGD)
    cases = [
        (*case, 2, accumulation) for case in (("ddp", 0), ("fsdp2", 3), ("deepspeed", 2)) for accumulation in (1, 4)
    ]
    runs = run_ranks(2, _train, [_recipe(*case, **SGD) for case in cases], 2)[0]
    for case, run in zip(cases, runs, strict=True):
        _assert_same(run, expected, case)


@pytest.mark.breadth
def test_a_mixture_of_experts_keeps_its_router_loss():
    """The router's loss is a mean within a micro-batch, so that their size is part of the run."""
    recipes = [_recipe(*case, 2, 4, **MOE) for case in (("ddp", 0), ("fsdp2", 3), ("deepspeed", 1))]
    expected = plain_run(tiny_recipe(**MOE), STEPS)
    without = {**MOE, "model.config": {**MOE["model.config"], "router_aux_loss_coef": 0.0}}
    other = plain_run(tiny_recipe(**without), STEPS)
    for run in run_ranks(2, _train, recipes, 2)[0]:
        _assert_same(run, expected, "router")
        assert worst(run.grad_norms, other.grad_norms) > 10 * FP32


def test_autocast_stays_near_the_plain_loop():
    precision = {"parallel.precision": "autocast_bf16"}
    expected = _reference(**precision)
    for run in run_ranks(2, _train, [_recipe(*case, 2, **precision) for case in (("ddp", 0), ("fsdp2", 3))], 2)[0]:
        # As in test_parity.py: every operand of a matrix product is rounded to 8 bits.
        assert worst(run.losses, expected.losses) < 2**-8
        assert worst(run.grad_norms, expected.grad_norms) < 2**-6
        assert run.losses[0] != _reference().losses[0]


def _bf16_reference() -> ReferenceRun:
    return reference_of(tiny_recipe(**{"parallel.precision": "bf16", "parallel.zero_stage": 1, **SGD}))


def test_bf16_under_fsdp2_is_the_bf16_loop_with_fp32_master_weights():
    expected = trace(_bf16_reference(), range(STEPS), 2, GLOBAL_BATCH // 2)
    recipes = [_recipe(*case, 2, **{"parallel.precision": "bf16", **SGD}) for case in SHARDED]
    for run in run_ranks(2, _train, recipes, 2)[0]:
        # The micro-batches are the same, so that only sums of fp32 gradients are taken in another order: master
        # weights that differ in the last place may be rounded to the other side, one bit of bf16.
        assert worst(run.losses, expected.losses) < 2**-10
        assert worst(run.grad_norms, expected.grad_norms) < 2**-9
        for name, value in run.weights.items():
            np.testing.assert_allclose(value, expected.weights[name], rtol=2**-7, atol=2**-12, err_msg=name)


def _small_updates(rank: int):
    """How far the weights of norms move, which start at 1, by steps of 1e-5: those that the optimizer holds."""
    fields = {"parallel.precision": "bf16", "optim.lr": 1e-5, "optim.warmup_steps": 0}
    found = []
    for case in (("ddp", 0), ("fsdp2", 3)):
        recipe = _recipe(*case, 1, **fields)
        draft = Draft(recipe, Cluster(), model_facts(recipe.model, recipe.vocab_size))
        engine = engine_of(assemble(draft))
        for step in range(3):
            engine.train_step(step_batch(step, 4, 2))
        norms = [_local(parameter) for name, parameter in engine.model.named_parameters() if "norm" in name]
        rules = [problem.rule for problem in broken(draft)[0]]
        found.append((rules, min(float((norm.float() - 1).abs().max()) for norm in norms)))
    return found


def _local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def test_bf16_under_ddp_is_refused_since_it_loses_small_updates():
    (ddp, moved), (fsdp2, moved_masters) = run_ranks(1, _small_updates)[0]
    assert ddp == ["backend.precision"]
    assert moved == 0
    assert fsdp2 == []
    assert 2e-5 < moved_masters < 4e-5


def _fp16_on_a_cpu(rank: int):
    recipe = _recipe("ddp", 0, 1, 4, **{"parallel.precision": "autocast_fp16"})
    draft = Draft(recipe, Cluster(), model_facts(recipe.model, recipe.vocab_size))
    return [problem.rule for problem in broken(draft)[0]], trace_plan(assemble(draft), STEPS, rank)


def test_fp16_is_refused_since_accelerate_ignores_it_on_cpus():
    rules, run = run_ranks(1, _fp16_on_a_cpu)[0]
    assert rules == ["backend.precision"]
    assert worst(run.losses, _reference().losses) < FP32  # fp32, not the requested precision


def _what_runs(rank: int):
    before = dict(os.environ)
    found = []
    for strategy, stage in CASES:
        engine = engine_of(plan_of(_recipe(strategy, stage, 2), 2))
        held = sum(parameter.untyped_storage().nbytes() // 4 for parameter in map(_local, engine.model.parameters()))
        found.append((engine.describe(), held, sum(weight.numel() for _, weight in engine.named_weights())))
        left = {name for name in os.environ.keys() - before.keys() if name.startswith(("ACCELERATE_", "FSDP_"))}
        assert not left
    return found


def test_accelerate_runs_the_requested_strategy():
    """On CPUs it takes FSDP's plugin and runs DistributedDataParallel."""
    for found in run_ranks(2, _what_runs):
        (ddp, replicated, whole), *sharded, zero1 = found[:3] + found[4:5]
        assert ddp["engine"].endswith("DistributedDataParallel")
        assert replicated >= whole
        for described, held, elements in sharded:
            assert described["engine"].endswith("FSDPLlamaForCausalLM")
            assert held < 0.6 * elements
        assert zero1[0]["engine"].startswith("accelerate")
        assert zero1[0]["optimizer"] == "DeepSpeedZeroOptimizer"


def _collectives(rank: int, strategy: str, stage: int) -> list[int]:
    """How often gradients are reduced in a step, by the number of micro-batches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    counts = []
    for accumulation in (1, 4):
        engine = engine_of(plan_of(_recipe(strategy, stage, 2, accumulation), 2))
        batches = [step_batch(step, 4 // accumulation, accumulation, rank, 2) for step in range(2)]
        engine.train_step(batches[0])
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            engine.train_step(batches[1])
        names = [event.name for event in profiler.events()]
        counts.append(sum("gloo:reduce_scatter" in name or "gloo:all_reduce" in name for name in names))
    assert torch.distributed.get_world_size() == 2
    return counts


@pytest.mark.parametrize(("strategy", "stage"), [("ddp", 0), ("fsdp2", 3)])
def test_gradients_are_reduced_once_a_step(strategy, stage):
    one, four = run_ranks(2, _collectives, strategy, stage)[0]
    assert one == four > 0


def _interrupted(rank: int, ranks: int, folder):
    import torch

    found = []
    for index, (strategy, stage, precision) in enumerate(RESUMED):
        plan = plan_of(_recipe(strategy, stage, ranks, **{"parallel.precision": precision, **DROPOUT}), ranks)
        shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps, rank, ranks)
        torch.manual_seed(rank)
        whole = trace_plan(plan, 8, rank)
        torch.manual_seed(rank)
        first = engine_of(plan)
        for step in range(4):
            first.train_step(step_batch(step, *shape))
        checkpoints = folder / str(index)
        Saver(checkpoints, plan, first).save(TrainerState(step=4, data="key"))
        weights = {name: weight.float().numpy() for name, weight in first.named_weights()}
        exported = saved_weights(newest(checkpoints), plan)
        same = all(np.array_equal(weights[name], exported[name].detach().float().numpy()) for name in weights)
        torch.manual_seed(999)
        second = engine_of(plan)
        load(newest(checkpoints), second, plan, "key")
        found.append((whole, trace(second, range(4, 8), *shape), same))
    return found


DROPOUT = {"model.config.attention_dropout": 0.1}  # a generator that is not restored shows
RESUMED = [
    *((*case, "fp32") for case in [("ddp", 0), *SHARDED, ("deepspeed", 2), ("deepspeed", 3)]),
    ("fsdp2", 3, "bf16"),
]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.breadth), pytest.param(2, marks=pytest.mark.slow)])
def test_a_continued_run_equals_the_uninterrupted_one_and_its_export_bit_for_bit(ranks, tmp_path):
    for results in run_ranks(ranks, _interrupted, ranks, tmp_path):
        for case, (whole, continued, same) in zip(RESUMED, results, strict=True):
            assert same, case
            assert continued.losses == whole.losses[4:], case
            assert continued.grad_norms == whole.grad_norms[4:], case
            assert continued.rates == whole.rates[4:], case
            assert all(np.array_equal(continued.weights[name], whole.weights[name]) for name in whole.weights), case


def _alone(rank: int):
    from accelerate import Accelerator

    from llmtrain.engines.accelerated import _checked
    from llmtrain.overrides.accelerate import join_group

    join_group(engine_of(plan_of(_recipe("ddp", 0, 2), 2)).device)
    accelerator = Accelerator(cpu=True)
    _checked(accelerator)
    accelerator.state.num_processes = 1  # its value on a CPU unless `cpu` is given
    try:
        _checked(accelerator)
    except RecipeError as error:
        return str(error)
    return None


def test_a_worker_that_accelerate_treats_as_a_single_process_fails():
    for rank, message in enumerate(run_ranks(2, _alone)):
        assert f"rank {rank} of 1" in message


def _shared_layers(rank: int):
    import torch
    from torch.distributed.fsdp import fully_shard

    from llmtrain.engines.accelerated import _check_unshared

    recipe = tiny_recipe()
    model = build_model(recipe, torch.float32, torch.device("cpu"))
    layers = model.model.layers
    _check_unshared(layers, "llama")
    layers[1].mlp = layers[0].mlp
    failures = []
    for attempt in (lambda: _check_unshared(layers, "llama"), lambda: [fully_shard(layer) for layer in layers]):
        try:
            attempt()
            model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
        except Exception as error:
            failures.append(type(error).__name__)
    return failures


def test_layers_that_share_weights_are_refused_before_fsdp2_fails():
    assert run_ranks(1, _shared_layers)[0] == ["RecipeError", "TypeError"]


REFUSED = [
    ("ddp", {"parallel.zero_stage": 1}, "backend.zero_stage"),
    ("fsdp2", {"parallel.zero_stage": 0}, "backend.zero_stage"),
    ("fsdp2", {"parallel.zero_stage": 1}, "backend.zero_stage"),
    ("ddp", {"parallel.precision": "bf16"}, "backend.precision"),
    ("fsdp2", {"parallel.precision": "fp16"}, "backend.precision"),
    ("fsdp2", {"parallel.precision": "autocast_fp16"}, "backend.precision"),
    ("fsdp2", {"parallel.precision": "bf16", "parallel.grad_accum_dtype": "bf16"}, "backend.grad_accum"),
    ("ddp", {"parallel.offload_optimizer": "cpu"}, "backend.offload"),
    ("fsdp2", {"parallel.offload_param": "cpu"}, "backend.offload"),
    ("ddp", {"parallel.nvme_path": "/nvme"}, "backend.offload"),
    ("ddp", {"parallel.pipeline": 2}, "backend.degrees"),
    ("deepspeed", {"parallel.tensor": 2}, "backend.degrees"),
    ("deepspeed", {"parallel.zero_stage": 0, "parallel.precision": "bf16"}, "precision.stage0"),
    ("deepspeed", {"parallel.zero_stage": 0, "parallel.offload_optimizer": "cpu"}, "zero.offload_optimizer_stage"),
    ("fsdp2", {"parallel.backend": "deepspeed"}, "backend.accelerate"),
]


@pytest.mark.parametrize(("strategy", "fields", "rule"), REFUSED)
def test_impossible_combinations_are_refused_by_their_rule(strategy, fields, rule):
    usual = {"ddp": 0, "fsdp2": 3, "deepspeed": 1}[strategy]
    with pytest.raises(RecipeError) as caught:
        resolve(_recipe(strategy, usual, 2, **fields), Cluster(devices_per_node=2))
    assert [problem.rule for problem in caught.value.problems] == [rule]
    assert all(problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize("case", CASES)
def test_the_fix_of_every_refusal_is_legal(case):
    """What the rules let through is what the tests above train."""
    check_runnable(plan_of(_recipe(*case, 2), 2))


def test_deepspeed_under_accelerate_has_the_same_configuration():
    direct = tiny_recipe(**{"parallel.zero_stage": 2, "batch.micro_batch_size": 2})
    assert render(plan_of(_recipe("deepspeed", 2, 2), 2)) == render(plan_of(direct, 2))
    assert render(plan_of(_recipe("ddp", 0, 2), 2)) == {}


def test_a_missing_package_is_refused(monkeypatch):
    plan = plan_of(_recipe("ddp", 0, 2), 2)
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"backend\.installed") as caught:
        check_runnable(plan)
    assert "pip install accelerate" in str(caught.value)
    check_runnable(plan_of(tiny_recipe(**{"batch.micro_batch_size": 4}), 2))
    assert importlib.util.find_spec("accelerate")
