"""Inputs of recomputed layers wait in host memory: the same results, no missing wait, and only two on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmtrain.engines import build_engine
from llmtrain.models.recompute import checkpoints
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.plan.predict import memory_of
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import step_batch, tiny_recipe

STEPS = 3
FULL = {"parallel.activation_checkpointing": "full", "model.config.num_hidden_layers": 4}
PLANS = {
    "ZeRO-1, bf16": {"parallel.zero_stage": 1, "parallel.precision": "bf16"},
    "ZeRO-3": {"parallel.zero_stage": 3},
    "every second": {"parallel.zero_stage": 2, "parallel.checkpoint_every": 2},
    "stages": {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    "FSDP2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
    "LoRA": {"parallel.zero_stage": 1, "model.adapter": {"rank": 4}},
}
FEW = ("ZeRO-1, bf16", "stages")


def plan_of(name: str, offloads: bool) -> Plan:
    fields = {**FULL, **PLANS[name], "parallel.offload_activations": offloads}
    return resolve(tiny_recipe(**fields), Cluster(devices_per_node=2, device="gpu"))


def _train(rank: int, plan: Plan) -> tuple[list[float], int]:
    """The losses and norms, and the bytes that the steps pinned."""
    from _cuda_on_host import pinned_bytes

    engine, batch = build_engine(plan, render(plan), torch.device("cuda", rank)), plan.batch
    shape = batch.micro_batch_size, batch.gradient_accumulation_steps
    numbers, before = list[float](), pinned_bytes()
    for step in range(STEPS):
        result = engine.train_step(step_batch(step, *shape, engine.data_parallel_rank, plan.data_parallel_size))
        numbers += [result.loss.item(), result.grad_norm.item()]
    return numbers, pinned_bytes() - before


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in FEW else pytest.mark.breadth) for name in PLANS]
)
def test_offloaded_inputs_change_no_bit(gpus, name):
    kept, offloaded = (gpus(2, _train, plan_of(name, offloads)) for offloads in (False, True))
    assert [numbers for numbers, _ in offloaded] == [numbers for numbers, _ in kept]
    assert all(taken == 0 for _, taken in kept)
    plan = plan_of(name, offloads=True)
    memory, passes = memory_of(plan), STEPS * plan.batch.gradient_accumulation_steps
    assert memory
    for rank, (_, taken) in enumerate(offloaded):
        stage = memory.stages[rank if name == "stages" else 0]
        # The emulated device counts all memory that was ever pinned; it does not reuse any.
        assert taken == passes * stage.host // stage.in_flight > 0


def _without_wait(rank: int, plan: Plan) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints._Copy, "leave", lambda copy: setattr(copy, "_tensor", None))
        return _train(rank, plan)


@pytest.mark.slow
def test_a_missing_wait_is_found(gpus):
    with pytest.raises(AssertionError, match="stream"):
        gpus(2, _without_wait, plan_of("ZeRO-1, bf16", offloads=True))
