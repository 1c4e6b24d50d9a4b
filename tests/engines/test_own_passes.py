"""The passes of a loop of the user's own compute what a step of each engine computes."""

import pytest

from llmtrain.errors import RecipeError
from tests.helpers.batches import MIXTRAL, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.own_passes import STEPS, traces_of_both_loops
from tests.helpers.traces import Trace, assert_same_bits, engine_of, plan_of

ACCELERATE = {"parallel.backend": "accelerate"}
PLANS = {
    "zero0 clips by its own norm": {"parallel.zero_stage": 0},
    "zero2 bf16": {"parallel.zero_stage": 2, "parallel.precision": "bf16"},
    "zero3 recomputes": {"parallel.zero_stage": 3, "parallel.activation_checkpointing": "full"},
    "sequence slices": {"parallel.zero_stage": 1, "parallel.sequence": 2},
    "tensor": {"parallel.zero_stage": 1, "parallel.tensor": 2},
    "router loss": {"parallel.zero_stage": 1, **MIXTRAL},
    "ddp": {"parallel.zero_stage": 0, "parallel.accelerate": "ddp", **ACCELERATE},
    "fsdp2 autocast": {
        **{"parallel.zero_stage": 3, "parallel.accelerate": "fsdp2", "parallel.precision": "autocast_bf16"},
        **ACCELERATE,
    },
}


def _traces(rank: int, name: str) -> tuple[Trace, Trace]:
    return traces_of_both_loops(plan_of(tiny_recipe(**PLANS[name]), 2))


def _cases() -> list:
    quick = ("zero2 bf16", "fsdp2 autocast")
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]


@pytest.mark.parametrize("name", _cases())
def test_own_passes_compute_the_same_bits(name):
    for ours, theirs in run_ranks(2, _traces, name):
        assert len(ours.losses) == STEPS
        assert_same_bits(ours, theirs, name)


def _refusals(rank: int) -> list[str]:
    refused = []
    plan = plan_of(tiny_recipe(**{"parallel.zero_stage": 1}), 1)
    engine = engine_of(plan)
    batch = step_batch(0, plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps, 0, 1)

    def first_only():
        with engine.own_passes(batch) as passes:
            for micro_batch in passes:
                passes.backward(passes.model(micro_batch).logits.float().sum())
                break

    def without_backward():
        with engine.own_passes(batch) as passes:
            for micro_batch in passes:
                passes.model(micro_batch)

    for faulty in (first_only, without_backward):
        with pytest.raises(RecipeError) as error:
            faulty()
        refused.append(error.value.problems[0].message)
    return refused


def test_missing_backward_passes_are_refused():
    assert run_ranks(1, _refusals) == [
        [
            "was called 1 times in a step of 8 micro-batches",
            "was called 0 times for the first 1 micro-batches of a step",
        ]
    ]


def _of_a_pipeline(rank: int) -> str:
    plan = plan_of(tiny_recipe(**{"parallel.zero_stage": 1, "parallel.pipeline": 2}), 2)
    batch = step_batch(0, plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps, 0, 1)
    with pytest.raises(RecipeError) as error, engine_of(plan).own_passes(batch):
        pass
    return error.value.problems[0].rule


@pytest.mark.slow
def test_a_pipeline_makes_its_passes_itself():
    assert run_ranks(2, _of_a_pipeline) == ["loop.pipeline"] * 2
