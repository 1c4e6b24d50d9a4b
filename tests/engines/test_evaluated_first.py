"""An evaluation before the first step does not change training."""

from __future__ import annotations

import pytest

from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, assert_same_bits, engine_of, plan_of, trace

RANKS = 2
CASES = {
    "zero0": {},
    "zero1": {"parallel.zero_stage": 1},
    "zero3": {"parallel.zero_stage": 3},
    "pipeline": {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    "tensor": {"parallel.tensor": 2, "parallel.zero_stage": 1},
    "sequence": {"parallel.sequence": 2, "parallel.zero_stage": 3},
    "expert": {**MIXTRAL, "parallel.expert": 2, "parallel.zero_stage": 2},
    "ddp": {"parallel.backend": "accelerate"},
    "fsdp2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
    "bf16-zero3": {"parallel.precision": "bf16", "parallel.zero_stage": 3},
}


def _run(rank: int, fields: dict, evaluates: bool) -> tuple[float | None, Trace]:
    shared = fields.get("parallel.pipeline", 1) * fields.get("parallel.tensor", 1) * fields.get("parallel.sequence", 1)
    plan = plan_of(tiny_recipe(**{"batch.micro_batch_size": GLOBAL_BATCH * shared // (2 * RANKS), **fields}), RANKS)
    engine = engine_of(plan)
    shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
    part = (engine.data_parallel_rank, plan.data_parallel_size)
    first = engine.eval_step(step_batch(998, *shape, *part)).item() if evaluates else None
    return first, trace(engine, range(3), *shape, *part)


def _both(rank: int, cases: list[dict]) -> list[tuple]:
    return [(_run(rank, fields, True), _run(rank, fields, False)) for fields in cases]


@pytest.mark.parametrize(
    "names", [["zero3", "fsdp2"], pytest.param(list(CASES), marks=pytest.mark.breadth)], ids=["some", "all"]
)
def test_an_evaluation_before_the_first_step_does_not_change_training(names):
    for found in run_ranks(RANKS, _both, [CASES[name] for name in names]):
        for name, ((first, ours), (_, theirs)) in zip(names, found, strict=True):
            assert first != ours.evaluation, name  # of the weights before the first step
            assert_same_bits(ours, theirs, name)
