"""The bytes that a plan is said to send are those that DeepSpeed sends."""

from __future__ import annotations

from collections import Counter

import pytest

from llmtrain.predict.traffic import volumes
from llmtrain.predict.work import DeviceShare, held_by
from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of

ZERO = {"parallel.precision": "bf16", "batch.micro_batch_size": GLOBAL_BATCH // 4}
EXPERTS = MIXTRAL | {"parallel.zero_stage": 1, "parallel.expert": 2, "batch.micro_batch_size": 2}
FULL = {"parallel.activation_checkpointing": "full"}
SELECTIVE = {"parallel.activation_checkpointing": "selective"}
PLANS = {
    "zero0": ZERO | {"parallel.zero_stage": 0, "parallel.precision": "fp32"},
    "zero1": ZERO | {"parallel.zero_stage": 1},
    "zero2": ZERO | {"parallel.zero_stage": 2},
    "zero3": ZERO | {"parallel.zero_stage": 3},
    "pipeline": {"parallel.zero_stage": 1, "parallel.pipeline": 2, "batch.micro_batch_size": 2},
    "tensor": {"parallel.zero_stage": 1, "parallel.tensor": 2, "batch.micro_batch_size": 2},
    "sequence": {"parallel.zero_stage": 1, "parallel.sequence": 2, "batch.micro_batch_size": 2},
    "tensor, recomputed": {"parallel.zero_stage": 1, "parallel.tensor": 2, "batch.micro_batch_size": 2, **FULL},
    "tensor, selective": {"parallel.zero_stage": 1, "parallel.tensor": 2, "batch.micro_batch_size": 2, **SELECTIVE},
    "sequence, recomputed": {"parallel.zero_stage": 1, "parallel.sequence": 2, "batch.micro_batch_size": 2, **FULL},
    "sequence, selective": {"parallel.zero_stage": 1, "parallel.sequence": 2, "batch.micro_batch_size": 2, **SELECTIVE},
    "expert": EXPERTS,
    "expert, recomputed": EXPERTS | FULL,
    "expert, selective": EXPERTS | SELECTIVE,
    "expert, tensor": EXPERTS | {"parallel.tensor": 2},
}
RANKS = {"expert, tensor": 4}
KINDS = {
    # In a ring of two ranks, each sends half of the bytes of a gather, and all of those of an all-reduce.
    "all_reduce": ("all_reduce", 1.0),
    "all_gather": ("all_gather", 1.0),  # the engine notes the shard
    "all_gather_into_tensor": ("all_gather", 1.0),
    "reduce_scatter_tensor": ("reduce_scatter", 0.5),
    "all_to_all_single": ("all_to_all", 0.5),
    "send": ("p2p", 1.0),
    "recv": ("p2p", 1.0),
}
"""Call of the engine → kind, and the part of the bytes it notes that a rank sends."""
SMALL = 1024
"""Bytes of a message that is no part of the model: norms, overflow flags, positions, padding, single norm weights."""


def _sent(rank: int, fields: dict, ranks: int) -> Counter:
    """Bytes by kind of the second step."""
    from deepspeed.comm import comm

    plan = plan_of(tiny_recipe(**fields), ranks)
    engine, batches = engine_of(plan), plan.batch
    own = engine.data_parallel_rank, plan.data_parallel_size
    for step in range(2):
        batch = step_batch(step, batches.micro_batch_size, batches.gradient_accumulation_steps, *own)
        comm.comms_logger.comms_dict.clear()
        engine.train_step(batch)
        comm.configure(enabled=True, prof_all=True, verbose=False)
    found: Counter = Counter()
    for call, sizes in comm.comms_logger.comms_dict.items():
        if call in KINDS:
            kind, part = KINDS[call]
            found[kind] += sum(size * noted[0] * part for size, noted in sizes.items() if size > SMALL)
    return +found


IN_SHORT = ("zero2", "zero3")
"""Starting engines takes seconds each."""


@pytest.mark.parametrize(
    "name", [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.breadth) for name in PLANS]
)
def test_the_engine_sends_what_is_counted(name):
    ranks = RANKS.get(name, 2)
    plan = plan_of(tiny_recipe(**PLANS[name]), ranks)
    dense, experts = DeviceShare(plan).shares(held_by(plan.model, plan.stages)[0])
    counted = volumes(plan)[0]
    each = run_ranks(ranks, _sent, PLANS[name], ranks)
    # Experts receive different numbers of tokens, but together all that are sent. Stages send different tensors.
    each = each if "expert" in name else each[:1]
    sent = {kind: sum(one[kind] for one in each) / len(each) for kind in each[0]}
    alone = {"pipeline": dense, "tensor": dense, "expert": experts}  # reductions among one rank are noted too
    sent["all_reduce"] = sent.get("all_reduce", 0) - 4 * alone.get(name.partition(", rec")[0].partition(", sel")[0], 0)
    assert {kind for kind, size in sent.items() if size} == {kind for kind, size in counted.items() if size}
    # Padding, and weights of norms, which are small messages.
    for kind, size in counted.items():
        assert sent[kind] == pytest.approx(size, rel=0.01), kind


@pytest.mark.breadth
def test_neighbours_gather_from_each_other_after_the_first_micro_batch():
    """The small model stays gathered between the passes of a micro-batch."""
    fields = ZERO | {"parallel.zero_stage": 3, "parallel.hierarchical_partition": 2, "batch.micro_batch_size": 1}
    plan = plan_of(tiny_recipe(**fields), 4)
    weights = 2 * plan.model.parameters
    noted = run_ranks(4, _sent, fields, 4)[0]["all_gather"]
    assert noted == pytest.approx(weights / 4 + weights / 2, rel=0.01)  # a shard of each gather
    assert volumes(plan)[0]["all_gather"] == pytest.approx(3 * weights / 4 + weights / 2)
