"""ZeRO-3 with a second copy of the parameters in each node (hpZ) matches the plain loop, and never uses old copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.plan import Plan
from tests.helpers.batches import GLOBAL_BATCH, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import take_steps
from tests.helpers.moe import moe_recipe
from tests.helpers.traces import assert_same, engine_of, plain_run, plan_of, trace_plan

RANKS, STEPS = 4, 6
HPZ = {"parallel.zero_stage": 3, "parallel.hierarchical_partition": 2}
PLANS = {
    "two micro-batches": {},
    "one micro-batch": {"batch.micro_batch_size": 2},
    "recomputed": {"parallel.activation_checkpointing": "full"},
    "sequence": {"parallel.sequence": 2},
    "parameters offloaded": {"parallel.offload_optimizer": "cpu", "parallel.offload_param": "cpu"},
    "LoRA": {"model.adapter": {"rank": 4}},
    "Accelerate": {"parallel.backend": "accelerate", "parallel.accelerate": "deepspeed"},
}
FEW = ("two micro-batches",)


def hierarchical(name: str) -> Plan:
    return plan_of(tiny_recipe(**HPZ, **PLANS[name]), RANKS)


def _train(rank: int, plan: Plan):
    return trace_plan(plan, STEPS, rank // plan.parallel.sequence)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in FEW else pytest.mark.breadth) for name in PLANS]
)
def test_hierarchical_partition_matches_the_plain_loop(name):
    plan = hierarchical(name)
    fields = {"model.adapter": {"rank": 4}} if name == "LoRA" else {}
    expected = plain_run(tiny_recipe(**fields), STEPS)
    for run in run_ranks(RANKS, _train, plan):
        assert_same(run, expected, name)


def _last_of(rank: int, plans: list[Plan]):
    *others, last = plans
    for plan in others:
        engine_of(plan).close()
    return trace_plan(last, 1, rank)


@pytest.mark.breadth
def test_a_process_may_have_several_engines_with_other_groups():
    """Distributed experts with tensor parallelism, and this partition twice."""
    plan, expected = hierarchical("two micro-batches"), plain_run(tiny_recipe(), 1)
    experts = plan_of(moe_recipe(**{"parallel.tensor": 2, "parallel.zero_stage": 1}), RANKS)
    for run in run_ranks(RANKS, _last_of, [experts, plan, plan]):
        assert_same(run, expected, "last")


def _go_back(rank: int, plan: Plan, folder: Path) -> tuple[list[float], list[float]]:
    """The losses of two steps; and of the same steps again, from the checkpoint before them."""
    engine = engine_of(plan)
    take_steps(engine, plan, range(2))
    Saver(folder, plan, engine).save(TrainerState(step=2, samples=2 * GLOBAL_BATCH, data="key"))
    first = take_steps(engine, plan, range(2, 4)).losses  # ends with an evaluation, which makes copies
    load(newest(folder), engine, plan, "key")
    return first, take_steps(engine, plan, range(2, 4)).losses


@pytest.mark.breadth
def test_copies_of_weights_do_not_survive_a_loaded_checkpoint(tmp_path):
    for first, again in run_ranks(RANKS, _go_back, hierarchical("two micro-batches"), tmp_path):
        assert first == again
