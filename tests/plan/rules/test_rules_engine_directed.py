"""Refused plans on the real engine, in spite of the rules: they fail or deviate as the rule says.

One plan for each rule that needs a plan of its own; `test_rules_engine_random` draws the others.
"""

from __future__ import annotations

from typing import Any

import pytest

from llmtrain.plan.rules import assemble
from tests.helpers.plans_on_engine import verdict
from tests.helpers.random_plans import Case, plan_of

ACCELERATE = {"parallel.backend": "accelerate"}
FSDP2 = ACCELERATE | {"parallel.accelerate": "fsdp2", "parallel.zero_stage": 3}
ON_DISK = {"parallel.zero_stage": 3, "parallel.offload_optimizer": "nvme"}
STAGES = {"parallel.pipeline": 2, "parallel.zero_stage": 1}
EXPERTS = {"architecture": "mixtral"}
RING = {"parallel.sequence": 2, "parallel.sequence_ring": 2, "model.attention": "varlen"}

REFUSED: list[tuple[str, int, dict[str, Any], dict[str, Any], str]] = [
    # rule, ranks, fields, sizes of the model, what the engine does
    ("backend.accelerate", 1, {"parallel.accelerate": "fsdp2"}, {}, "ignores parallel.accelerate"),
    ("backend.degrees", 2, ACCELERATE | {"parallel.pipeline": 2}, {}, "stages 2 as 1"),
    ("backend.degrees", 2, ACCELERATE | {"parallel.tensor": 2}, {}, "tensor slices True as False"),
    ("backend.degrees", 2, ACCELERATE | {"parallel.expert": 2}, EXPERTS, "spread experts True as False"),
    ("backend.zero_stage", 1, ACCELERATE | {"parallel.zero_stage": 2}, {}, "ZeRO stage 2 as 0"),
    ("backend.grad_accum", 1, ACCELERATE | {"parallel.grad_accum_dtype": "bf16"}, {}, "ignores"),
    ("backend.offload", 1, FSDP2 | {"parallel.offload_optimizer": "cpu"}, {}, "offloaded states True as False"),
    ("data_parallel.devices", 2, {"parallel.backend": "data_parallel"}, {}, "devices 2 as 1"),
    ("zero.nvme_path", 1, ON_DISK, {}, "TypeError: expected str"),
    ("zero.nvme_path", 1, {"parallel.nvme_path": "/nvme"}, {}, "ignores parallel.nvme_path"),
    ("layout.sequence_ring", 2, RING | {"model.attention": "sdpa"}, {}, "attention sdpa as varlen"),
    ("layout.sequence_ring", 2, RING | {"data.sequence_length": 18}, {}, "fails"),
    ("tensor.divides", 2, {"parallel.tensor": 2}, {"intermediate_size": 33}, "is not divisible by 2"),
    ("tensor.divides", 4, STAGES | {"parallel.tensor": 2}, {"intermediate_size": 33}, "is not divisible by 2"),
]


@pytest.mark.parametrize(("rule", "ranks", "fields", "sizes", "words"), REFUSED)
def test_refused_plans_fail_or_deviate(rule, ranks, fields, sizes, words):
    one = plan_of(fields, sizes, ranks)
    assert one.rules == {rule}
    assert words in verdict(one)


RINGS = [
    (4, {"parallel.sequence": 4, "parallel.zero_stage": 3}, {"heads": (2, 1)}),
    (4, {"parallel.sequence": 2, "parallel.tensor": 2, "parallel.zero_stage": 2}, {"heads": (2, 2)}),
    (4, STAGES | RING | {"parallel.pipeline_schedule": "interleaved", "parallel.pipeline_chunks": 2}, {}),
    (4, RING | {"parallel.expert": 2, "parallel.activation_checkpointing": "selective"}, EXPERTS),
]
"""Beside each other axis, if only because ranks do not divide the heads."""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "fields", "sizes"), RINGS)
def test_rings_train_correctly_beside_other_axes(ranks, fields, sizes):
    one = plan_of({**fields, "model.attention": "varlen"}, {"num_hidden_layers": 4} | sizes, ranks)
    assert assemble(one.draft).sequence_ring == 2
    assert one.rules == set()
    assert not verdict(one)


@pytest.mark.breadth
def test_fp16_accumulation_errors_are_visible_with_sgd_in_fp32():
    """Under autocast, and with Adam in fp32, other roundings are as large; SGD in fp32 has the sums' own."""
    fields = {"parallel.zero_stage": 3, "parallel.precision": "autocast_bf16", "parallel.grad_accum_dtype": "fp16"}
    one = plan_of(fields, {}, 1)
    assert one.rules == {"precision.grad_accum"}
    assert "deviates" in verdict(one)


def test_experts_with_unaligned_rows_never_run():
    """Not in the plain loop either."""
    one: Case = plan_of({}, EXPERTS | {"intermediate_size": 54}, 1)
    assert one.rules == {"model.experts_aligned"}
    assert "multiple of 16 bytes" in verdict(one)
    assert plan_of({}, EXPERTS | {"intermediate_size": 52}, 1).rules == set()
    assert plan_of(
        {"parallel.precision": "bf16", "parallel.zero_stage": 1}, EXPERTS | {"intermediate_size": 52}, 1
    ).rules


def test_uneven_tensor_parallel_heads_may_be_divided_by_sequence_ranks():
    """AutoTP gives four heads to one rank and two to the other; two sequence ranks can divide both."""
    one = plan_of({"parallel.tensor": 2, "parallel.sequence": 2}, {"heads": (6, 3)}, 4)
    assert one.rules == {"layout.tensor_divides"}


@pytest.mark.breadth
def test_noise_that_adam_amplifies_is_not_a_disagreement():
    """The keys' biases of GPT-2 have a gradient of nothing but rounding."""
    fields = {"parallel.zero_stage": 3, "parallel.precision": "bf16", "optim.name": "adam", "optim.clip_grad_norm": 0.0}
    fields |= {"parallel.sequence": 2, "batch.global_batch_size": 8, "batch.micro_batch_size": 2}
    assert not verdict(plan_of(fields | {"model.attention": "eager"}, {"architecture": "gpt2"}, 2))
