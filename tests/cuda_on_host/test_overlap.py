"""ZeRO-1 and 2 reduce gradients during the backward pass (`overlap_comm`): no missing wait, and the same bits.

The device reports a missing wait whatever the speed of the ranks: it asks which order of kernels is guaranteed, and not
which one occurs (`order.h`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmtrain.engines import build_engine
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.plan.rules import resolve
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import step_batch, tiny_recipe
from tests.helpers.moe import moe_recipe

LARGE, SMALL = 20_000, 3_000
"""Elements of a bucket: of several weights, but less than two layers have; and fewer than most matrices have."""
LONG = 60
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"parallel.zero_stage": 1},
    "ZeRO-1, autocast": {"parallel.zero_stage": 1, "parallel.precision": "autocast_bf16"},
    "ZeRO-1, sequence": {"parallel.zero_stage": 1, "parallel.sequence": 2},
    "ZeRO-1, Muon": {"parallel.zero_stage": 1, "optim.name": "muon"},
    "ZeRO-2": {"parallel.zero_stage": 2},
    "ZeRO-2, bf16": {"parallel.zero_stage": 2, "parallel.precision": "bf16"},
    "ZeRO-2, bf16, four ranks": {"parallel.zero_stage": 2, "parallel.precision": "bf16"},
    "ZeRO-2, four ranks": {"parallel.zero_stage": 2},
    "ZeRO-2, one micro-batch": {"parallel.zero_stage": 2, "batch.micro_batch_size": 4, "optim.clip_grad_norm": 0.0},
    "ZeRO-2, fp16": {"parallel.zero_stage": 2, "parallel.precision": "fp16"},
    "ZeRO-2, tied": {"parallel.zero_stage": 2, "model.config.tie_word_embeddings": True},
    "ZeRO-2, recomputed, offloaded inputs": {
        **{"parallel.zero_stage": 2, "parallel.activation_checkpointing": "full", "parallel.offload_activations": True},
    },
    "ZeRO-2, LoRA": {"parallel.zero_stage": 2, "parallel.precision": "bf16", "model.adapter": {"rank": 4}},
    "ZeRO-2, offload": {"parallel.zero_stage": 2, "parallel.precision": "bf16", "parallel.offload_optimizer": "cpu"},
    "ZeRO-2, tensor, four ranks": {"parallel.zero_stage": 2, "parallel.tensor": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ZeRO-2, bf16": {"parallel.zero_stage": 2, "parallel.precision": "bf16"},
    "ZeRO-1, tensor, four ranks": {"parallel.zero_stage": 1, "parallel.tensor": 2},
}
FEW = {"ZeRO-1": LARGE, "ZeRO-2, bf16": SMALL}
"""Those that are always tested: buckets in turn, and gradients that are reduced where they are."""


def plan_of(name: str) -> Plan:
    return resolved(name, tiny_recipe(**{"model.config.tie_word_embeddings": False, **PLANS[name]}))


def resolved(name: str, recipe: Recipe) -> Plan:
    return resolve(recipe, Cluster(devices_per_node=4 if "four ranks" in name else 2, device="h100"))


def train(rank: int, plan: Plan, zero: dict[str, Any], steps: int) -> tuple[list[Any], dict[str, int]]:
    """Losses, norms and weights; and how often the host waited for the device in the last step, by kind."""
    from _cuda_on_host import waits

    config = render(plan)
    config["zero_optimization"] |= zero
    engine, batch = build_engine(plan, config, torch.device("cuda", rank)), plan.batch
    shape = batch.micro_batch_size, batch.gradient_accumulation_steps
    numbers: list[Any] = []
    for step in range(steps):
        before = waits()
        result = engine.train_step(step_batch(step, *shape, engine.data_parallel_rank, plan.data_parallel_size))
        waited = {kind: count - before.get(kind, 0) for kind, count in waits().items() if count > before.get(kind, 0)}
        numbers += [result.loss.item(), result.grad_norm.item()]
    return [*numbers, *((name, one.float().numpy().tobytes()) for name, one in engine.named_weights())], waited


def compare(gpus, plan: Plan, bucket: int, steps: int) -> None:
    zero = {"reduce_bucket_size": bucket}
    ranks = plan.cluster.world_size
    after, beside = (gpus(ranks, train, plan, zero | {"overlap_comm": on}, steps) for on in (False, True))
    for (numbers, waits), (expected, waits_of_expected) in zip(beside, after, strict=True):
        assert numbers == expected
        if plan.parallel.offload_optimizer == "none":  # else the host needs the gradients
            assert waits == waits_of_expected


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bucket"), FEW.items())
def test_overlapping_changes_no_bit(gpus, name, bucket):
    compare(gpus, plan_of(name), bucket, steps=4)


@pytest.mark.breadth
@pytest.mark.parametrize("bucket", [LARGE, SMALL])
@pytest.mark.parametrize("name", PLANS)
def test_overlapping_changes_no_bit_under_other_plans(gpus, name, bucket):
    compare(gpus, plan_of(name), bucket, LONG)


@pytest.mark.breadth
@pytest.mark.parametrize("name", EXPERTS)
def test_overlapping_changes_no_bit_of_distributed_experts(gpus, name):
    compare(gpus, resolved(name, moe_recipe(**EXPERTS[name])), SMALL, steps=4)
