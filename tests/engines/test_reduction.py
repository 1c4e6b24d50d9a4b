"""At ZeRO-0, gradients are copied to a bucket only if several ranks share the sum."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import distributed as dist

from llmtrain.overrides.deepspeed import reduce_among_several
from tests.helpers.batches import step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of


def _buffers(rank: int, ranks: int, fields: dict[str, object]) -> int:
    """How many buffers of gradients a step has filled."""
    plan = plan_of(tiny_recipe(**{"batch.micro_batch_size": 2, **fields}), ranks)
    engine = engine_of(plan)
    own, filled = engine.engine.allreduce_bucket, []

    def noting(bucket, *arguments, **named):
        filled.append(bucket)
        return own(bucket, *arguments, **named)

    engine.engine.allreduce_bucket = noting
    shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
    engine.train_step(step_batch(0, *shape, engine.data_parallel_rank, plan.data_parallel_size))
    return len(filled)


@pytest.mark.parametrize(
    ("ranks", "fields", "expected"),
    [
        (1, {}, False),
        (2, {}, True),
        (2, {"parallel.tensor": 2}, False),
        (2, {"parallel.pipeline": 2, "optim.clip_grad_norm": 0.0}, False),
        (2, {"parallel.sequence": 2}, True),
    ],
    ids=["alone", "data", "tensor", "pipeline", "sequence"],
)
def test_gradients_are_copied_to_a_bucket_only_in_groups_of_several_ranks(ranks, fields, expected):
    assert [bool(found) for found in run_ranks(ranks, _buffers, ranks, fields)] == [expected] * ranks


def _divided(rank: int) -> list[int | None]:
    taken = []
    engine = SimpleNamespace(allreduce_no_retain=lambda bucket, group, dp_world_size=None: taken.append(dp_world_size))
    reduce_among_several(engine)
    for size in (None, 1, 2):
        engine.allreduce_no_retain([], dist.group.WORLD, dp_world_size=size)
    return taken


def test_gradients_of_unshared_experts_are_divided_by_all_data_parallel_ranks():
    assert run_ranks(1, _divided) == [[None, 2]]
