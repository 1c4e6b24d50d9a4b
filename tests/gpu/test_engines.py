"""Engines on one GPU: each equals the reference on the CPU, repeats its bits, continues from its checkpoint, and does
not wait for the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.models import build_model
from llmtrain.recipe import Recipe
from llmtrain.trials.verify import compare
from tests.engines.test_nf4 import recipe_on
from tests.gpu.conftest import Run
from tests.gpu.worker import GPU, engine_of, initial_weights, plan_of, train, waits_forbidden
from tests.helpers.batches import GLOBAL_BATCH, step_batch, tiny_recipe
from tests.helpers.reference_run import ReferenceRun
from tests.helpers.traces import Trace, assert_same_bits, trace

STEPS = 4
CPU = torch.device("cpu")
SGD = {"optim.name": "sgd", "optim.lr": 0.1}
FSDP2 = {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}
ALL_OFFLOADED = {"parallel.offload_optimizer": "cpu", "parallel.offload_param": "cpu"}
STRATEGIES: dict[str, dict[str, Any]] = {
    **{f"ZeRO-{stage}": {"parallel.zero_stage": stage} for stage in range(4)},
    "ZeRO-1, offload": {"parallel.zero_stage": 1, "parallel.offload_optimizer": "cpu"},
    "ZeRO-2, offload": {"parallel.zero_stage": 2, "parallel.offload_optimizer": "cpu"},
    "ZeRO-3, offload": {"parallel.zero_stage": 3, **ALL_OFFLOADED},
    "DDP": {"parallel.backend": "accelerate"},
    "FSDP2": FSDP2,
}
OPTIMIZERS = ("adam", "lion", "muon", "adafactor", "adamw_8bit", "schedule_free_adamw")


_references: dict[str, tuple[Trace, compare.Weights]] = {}


def reference_of(gpu: Run, recipe: Recipe) -> tuple[Trace, compare.Weights]:
    """The reference's run on the CPU from the GPU's initial weights, and these; computed once."""
    if repr(recipe) not in _references:
        drawn = {name: torch.from_numpy(value) for name, value in gpu(initial_weights, recipe).items()}
        run = ReferenceRun(recipe, weights=drawn)
        initial = {name: value.clone() for name, value in run.named_weights()}
        _references[repr(recipe)] = trace(run, range(STEPS), 1, GLOBAL_BATCH), initial
    return _references[repr(recipe)]


def assert_near(gpu: Run, run: Trace, recipe: Recipe, name: str) -> None:
    """Within what two fp32 runs differ by that only add in another order, as `verify.compare` derives."""
    reference, initial = reference_of(gpu, recipe)
    ours, theirs = (
        compare.Trace(one.losses, one.grad_norms, one.rates, one.evaluation, _tensors(one)) for one in (run, reference)
    )
    found = compare.deviation(ours, theirs, initial)
    assert found.within(compare.tolerance([], initial, recipe.optim.name)), (name, found)


def _tensors(run: Trace) -> compare.Weights:
    return {name: torch.from_numpy(value) for name, value in run.weights.items()}


@pytest.mark.parametrize("optimizer", [{}, SGD], ids=["AdamW", "SGD"])
def test_strategies_equal_the_reference_on_the_cpu(gpu, optimizer):
    for name, fields in STRATEGIES.items():
        run = gpu(train, tiny_recipe(**fields, **optimizer, **{"batch.micro_batch_size": 4}), STEPS)
        assert_near(gpu, run, tiny_recipe(**optimizer), name)


def test_optimizers_equal_those_of_the_reference(gpu):
    for name in OPTIMIZERS:
        fields = {"optim.name": name}
        run = gpu(train, tiny_recipe(**fields, **{"parallel.zero_stage": 1}), STEPS)
        assert_near(gpu, run, tiny_recipe(**fields), name)


def test_frozen_weights_in_4_bit_are_those_of_the_reference(gpu, tmp_path):
    untied = tiny_recipe(**{"model.config.tie_word_embeddings": False, "train.seed": 3})
    build_model(untied, torch.float32, CPU).save_pretrained(tmp_path)
    recipe = recipe_on(tmp_path)
    assert_near(gpu, gpu(train, recipe.with_(**{"parallel.zero_stage": 1}), STEPS), recipe, "nf4")


def _again(recipe: Recipe, folder: Path) -> tuple[Trace, Trace, Trace]:
    """The last two of four steps: uninterrupted, of a second run, and continued from the first one's checkpoint."""
    whole, shape = engine_of(recipe)
    second, _ = engine_of(recipe)
    for step in range(2):
        for engine in (whole, second):
            engine.train_step(step_batch(step, *shape))
    plan = plan_of(recipe)
    saver = Saver(folder, plan, whole, "run")
    saver.start(TrainerState(step=2, data="data"))
    of_whole = trace(whole, range(2, STEPS), *shape)  # while the save is written
    saver.wait()
    continued, _ = engine_of(recipe)
    load(newest(folder), continued, plan, "data")
    return of_whole, trace(second, range(2, STEPS), *shape), trace(continued, range(2, STEPS), *shape)


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel.zero_stage": 1, "parallel.precision": "bf16", "model.attention": "varlen"},
        {"parallel.zero_stage": 2, "parallel.precision": "bf16", "parallel.offload_optimizer": "cpu"},
        {"parallel.zero_stage": 3, "model.attention": "sdpa"},
        FSDP2 | {"parallel.precision": "bf16", "parallel.activation_checkpointing": "selective"},
    ],
    ids=str,
)
def test_a_second_run_and_a_continued_one_have_the_same_bits(gpu, tmp_path, fields):
    """With one tile of keys in each document, no kernel of attention adds in an order that varies."""
    whole, second, continued = gpu(_again, tiny_recipe(**fields), tmp_path)
    assert_same_bits(second, whole, "a second run")
    assert_same_bits(continued, whole, "a continued run")


def _step_without_waits(recipe: Recipe) -> float:
    engine, shape = engine_of(recipe)
    for step in range(2):
        engine.train_step(step_batch(step, *shape))
    batch = step_batch(2, *shape)
    torch.cuda.synchronize()
    with waits_forbidden():
        result = engine.train_step(batch)
    return float(result.loss)


@pytest.mark.parametrize("name", ["ZeRO-0", "ZeRO-1", "ZeRO-2", "DDP", "FSDP2"])
def test_a_step_does_not_wait_for_the_device(gpu, name):
    """But for ZeRO-3 and offload, in which DeepSpeed waits (`tests/cuda_on_host/test_waits.py`)."""
    fields = {**STRATEGIES[name], "parallel.precision": "bf16", "model.attention": "varlen"}
    if name in ("ZeRO-0", "DDP"):
        fields["parallel.precision"] = "autocast_bf16"
    assert gpu(_step_without_waits, tiny_recipe(**fields)) > 0


def _a_wait() -> None:
    with waits_forbidden():
        torch.ones(1, device=GPU).item()


def test_a_wait_is_found(gpu):
    with pytest.raises(AssertionError, match=r"synchroniz|waits"):
        gpu(_a_wait)


def _collectives() -> str:
    """NCCL with one rank: each collective returns what it was given."""
    given = torch.arange(1024.0, device=GPU)
    works = []
    reduced, gathered, scattered = given.clone(), torch.zeros_like(given), torch.zeros_like(given)
    works.append(dist.all_reduce(reduced, async_op=True))
    works.append(dist.all_gather_into_tensor(gathered, given, async_op=True))
    works.append(dist.reduce_scatter_tensor(scattered, given, async_op=True))
    for work in works:
        work.wait()
    dist.broadcast(given, 0)
    dist.barrier()
    for found in (reduced, gathered, scattered):
        torch.testing.assert_close(found, given, rtol=0, atol=0)
    return str(dist.get_backend())


def test_nccl_works_with_one_rank(gpu):
    assert gpu(_collectives) == "nccl"


WIDE = {
    "model.config.hidden_size": 1024,
    "model.config.intermediate_size": 4096,
    "model.config.num_hidden_layers": 8,
    "model.config.num_attention_heads": 8,
    "model.attention": "eager",
    "parallel.activation_checkpointing": "full",
    "parallel.zero_stage": 1,
    "parallel.precision": "bf16",
    "batch.micro_batch_size": 8,
}
"""Large enough that the copies take some time. No kernel of eager attention adds in an order that varies."""


def test_inputs_that_wait_in_host_memory_change_no_bit(gpu):
    kept, offloaded = (
        gpu(train, tiny_recipe(**WIDE, **{"parallel.offload_activations": offloads}), 3) for offloads in (False, True)
    )
    assert_same_bits(offloaded, kept, json.dumps(WIDE))
