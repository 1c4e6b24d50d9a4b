"""The predicted bytes and messages of a plan are those that its ranks send."""

from __future__ import annotations

from collections import Counter

import pytest

from llmtrain.plan.predict.links import RankGroup, bytes_sent
from llmtrain.plan.predict.traffic import CommunicationGroups, volumes
from llmtrain.plan.predict.work import parameters_of_stages
from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, step_batch, tiny_recipe
from tests.helpers.collectives import Collectives, Seen
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of

ZERO = {"parallel.precision": "bf16", "batch.micro_batch_size": GLOBAL_BATCH // 4}
EXPERTS = MIXTRAL | {"parallel.zero_stage": 1, "parallel.expert": 2, "batch.micro_batch_size": 2}
FULL = {"parallel.activation_checkpointing": "full"}
SELECTIVE = {"parallel.activation_checkpointing": "selective"}
TENSOR = {"parallel.zero_stage": 1, "parallel.tensor": 2, "batch.micro_batch_size": 2}
RING = {
    **{"parallel.zero_stage": 1, "parallel.sequence": 2, "parallel.sequence_ring": 2, "batch.micro_batch_size": 2},
    "model.attention": "varlen",
}
ADAFACTOR = ZERO | {"parallel.zero_stage": 1, "optim.name": "adafactor"}
PLANS = {
    "zero0": ZERO | {"parallel.zero_stage": 0, "parallel.precision": "fp32"},
    "zero1": ZERO | {"parallel.zero_stage": 1},
    "zero2": ZERO | {"parallel.zero_stage": 2},
    "zero3": ZERO | {"parallel.zero_stage": 3},
    "zero3, hierarchical": ZERO
    | {"parallel.zero_stage": 3, "parallel.hierarchical_partition": 2, "batch.micro_batch_size": 1},
    "zero1, adafactor": ADAFACTOR,
    "zero1, adafactor, cut within a matrix": ADAFACTOR | {"model.config.vocab_size": 272},
    "pipeline": {"parallel.zero_stage": 1, "parallel.pipeline": 2, "batch.micro_batch_size": 2},
    "tensor": TENSOR,
    "tensor, untied": TENSOR | {"model.config.tie_word_embeddings": False},
    "tensor, a vocabulary that does not divide": TENSOR | {"model.config.vocab_size": 257},
    "tensor of Qwen 3, ZeRO-3": TENSOR | {"model.architecture": "qwen3", "parallel.zero_stage": 3},
    "tensor of Gemma 2": TENSOR | {"model.architecture": "gemma2", "model.attention": "eager"},
    "tensor of Cohere": TENSOR | {"model.architecture": "cohere"},
    "tensor of StarCoder 2, biases": TENSOR | {"model.architecture": "starcoder2"},
    "tensor, whole residual": TENSOR | {"parallel.tiled_mlp": True},
    "tensor of Mixtral": TENSOR | MIXTRAL,
    "tensor in stages": TENSOR | {"parallel.pipeline": 2},
    "tensor in stages, recomputed": TENSOR | {"parallel.pipeline": 2, **FULL},
    "tensor and data": TENSOR | {"parallel.zero_stage": 2, "parallel.precision": "bf16"},
    "sequence": {"parallel.zero_stage": 1, "parallel.sequence": 2, "batch.micro_batch_size": 2},
    "tensor, recomputed": TENSOR | FULL,
    "tensor, selective": TENSOR | SELECTIVE,
    "sequence, recomputed": {"parallel.zero_stage": 1, "parallel.sequence": 2, "batch.micro_batch_size": 2, **FULL},
    "sequence, selective": {"parallel.zero_stage": 1, "parallel.sequence": 2, "batch.micro_batch_size": 2, **SELECTIVE},
    "ring": RING,
    "ring, recomputed": RING | FULL,
    "ring, selective": RING | SELECTIVE,
    "ring of groups that divide heads": RING | {"parallel.sequence": 4},
    "expert": EXPERTS,
    "expert, recomputed": EXPERTS | FULL,
    "expert, selective": EXPERTS | SELECTIVE,
    "expert, tensor": EXPERTS | {"parallel.tensor": 2},
}
RANKS = {
    "zero3, hierarchical": 4,
    "ring of groups that divide heads": 4,
    "expert, tensor": 4,
    "tensor in stages": 4,
    "tensor in stages, recomputed": 4,
    "tensor and data": 4,
}
SMALL = 1100
"""Bytes of a message that is no part of the model: norms, overflow flags, positions, padding, single norm weights, and
the indices of tokens that go to experts."""
SMALL_BESIDE_SLICES = 200
"""The same of tensor parallel ranks, which sum the gradients of single norm weights, 256 bytes each. Those of the norms
of heads are smaller, and not counted."""


def _seen(rank: int, fields: dict, ranks: int) -> list[Seen]:
    """What a rank sends and receives in its second step."""
    plan = plan_of(tiny_recipe(**fields), ranks)
    engine, batches = engine_of(plan), plan.batch
    own = engine.data_parallel_rank, plan.data_parallel_size
    collectives = Collectives()
    for step in range(2):
        batch = step_batch(step, batches.micro_batch_size, batches.gradient_accumulation_steps, *own)
        collectives.seen.clear()
        with collectives:
            engine.train_step(batch)
    small = SMALL_BESIDE_SLICES if plan.megatron_sp_ranks > 1 else SMALL
    return [one for one in collectives.seen if one.size > small]


def _messages(plan) -> Counter:
    """The number of messages of a rank of the first stage, by kind."""
    traffic = CommunicationGroups(plan).traffic(parameters_of_stages(plan.model, plan.stages)[0])
    found: Counter = Counter()
    for one in traffic.per_step(plan.batch.gradient_accumulation_steps):
        reached = [where for size, where in one.tensors if isinstance(where, RankGroup) and where.size > 1 and size]
        found[one.kind] += round(one.times * len(reached))
    return +found


IN_SHORT = ("zero2", "zero3", "tensor")
"""Starting engines takes seconds each."""


@pytest.mark.parametrize(
    "name", [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.breadth) for name in PLANS]
)
def test_the_engine_sends_the_predicted_bytes(name):
    ranks = RANKS.get(name, 2)
    plan = plan_of(tiny_recipe(**PLANS[name]), ranks)
    counted = volumes(plan)[0]
    each = run_ranks(ranks, _seen, PLANS[name], ranks)
    # Experts receive different numbers of tokens, but together all that are sent. Stages send different tensors.
    each = each if "expert" in name else each[:1]
    found: Counter = Counter()
    for one in (one for seen in each for one in seen):
        found[one.kind] += bytes_sent(one.kind, one.size, RankGroup(one.ranks, 1)) / len(each)
    assert found.keys() == {kind for kind, size in counted.items() if size}
    # Padding, and weights of norms, which are small messages.
    for kind, size in counted.items():
        assert found[kind] == pytest.approx(size, rel=0.01), kind
    if name.startswith("tensor") and plan.gradient_ranks == 1:  # ZeRO's buckets are no single messages
        assert Counter(one.kind for one in each[0]) == _messages(plan)
