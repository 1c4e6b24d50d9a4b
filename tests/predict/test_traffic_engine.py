"""The bytes that a plan is said to send are those that DeepSpeed sends."""

from __future__ import annotations

from collections import Counter

import pytest

from llmtrain.predict.traffic import volumes
from llmtrain.predict.work import DeviceShare, held_by
from tests.helpers.batches import GLOBAL_BATCH, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of

ZERO = {"parallel.precision": "bf16", "batch.micro_batch_size": GLOBAL_BATCH // 4}
PLANS = {
    "zero0": ZERO | {"parallel.zero_stage": 0, "parallel.precision": "fp32"},
    "zero1": ZERO | {"parallel.zero_stage": 1},
    "zero2": ZERO | {"parallel.zero_stage": 2},
    "zero3": ZERO | {"parallel.zero_stage": 3},
    "pipeline": {"parallel.zero_stage": 1, "parallel.pipeline": 2, "batch.micro_batch_size": 2},
    "tensor": {"parallel.zero_stage": 1, "parallel.tensor": 2, "batch.micro_batch_size": 2},
    "sequence": {"parallel.zero_stage": 1, "parallel.sequence": 2, "batch.micro_batch_size": 2},
}
KINDS = {
    # In a ring of two ranks, each sends half of the bytes of a gather, and all of those of an all-reduce.
    "all_reduce": ("all_reduce", 1.0),
    "all_gather_into_tensor": ("all_gather", 1.0),  # the engine notes the shard
    "reduce_scatter_tensor": ("reduce_scatter", 0.5),
    "all_to_all_single": ("all_to_all", 0.5),
    "send": ("p2p", 1.0),
    "recv": ("p2p", 1.0),
}
"""Call of the engine → kind, and the part of the bytes it notes that a rank sends."""
SMALL = 1024
"""Bytes of a message that is no part of the model: norms, overflow flags, positions, padding, single norm weights."""


def _sent(rank: int, fields: dict) -> dict[str, float]:
    """Bytes by kind of the second step."""
    from deepspeed.comm import comm

    plan = plan_of(tiny_recipe(**fields), 2)
    engine = engine_of(plan)
    replica = rank if plan.data_parallel_size == 2 else 0
    for step in range(2):
        batch = step_batch(
            step, plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps, replica, plan.data_parallel_size
        )
        comm.comms_logger.comms_dict.clear()
        engine.train_step(batch)
        comm.configure(enabled=True, prof_all=True, verbose=False)
    found: Counter = Counter()
    for call, sizes in comm.comms_logger.comms_dict.items():
        if call in KINDS:
            kind, part = KINDS[call]
            found[kind] += sum(size * noted[0] * part for size, noted in sizes.items() if size > SMALL)
    return {kind: size for kind, size in found.items() if size}


def _counted(fields: dict) -> dict[str, int]:
    """The same by the model."""
    return volumes(plan_of(tiny_recipe(**fields), 2))[0]


IN_SHORT = ("zero2", "zero3")
"""Starting engines takes seconds each."""


@pytest.mark.parametrize(
    "name", [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.breadth) for name in PLANS]
)
def test_the_engine_sends_what_is_counted(name):
    sent, counted = run_ranks(2, _sent, PLANS[name])[0], _counted(PLANS[name])
    if name in ("pipeline", "tensor"):
        # Groups of one rank are noted too: all gradients, in two groups of parameters.
        sent["all_reduce"] -= _alone(PLANS[name])
    assert set(sent) == {kind for kind, size in counted.items() if size}
    # Padding, and weights of norms, which are small messages.
    for kind, size in counted.items():
        assert sent[kind] == pytest.approx(size, rel=0.01), kind


def _alone(fields: dict) -> float:
    """Bytes of the gradients of the first rank."""
    plan = plan_of(tiny_recipe(**fields), 2)
    return DeviceShare(plan).own(held_by(plan.model, plan.stages)[0]) * 4
