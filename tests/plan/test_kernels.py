"""The kernels of a plan, and their costs."""

from __future__ import annotations

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan.described import kernel_lines
from llmtrain.plan.kernels import chunks_loss
from llmtrain.plan.predict import memory_of
from llmtrain.plan.predict.time import predict
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers.small_plan import small_plan

LARGE = {"model.config.vocab_size": 128_000, "batch.micro_batch_size": 8, "batch.global_batch_size": 16}
LONGER = LARGE | {"data.sequence_length": 1024}
STAGES = {"parallel.pipeline": 2, "parallel.zero_stage": 1}
WIDE = {"model.config.hidden_size": 512, "model.config.num_hidden_layers": 64}
"""Enough layers for the head to be a small part of the model."""


def logits_of(**fields) -> int:
    return memory_of(small_plan(**fields)).stages[-1].forward.logits


@pytest.mark.parametrize(
    ("fields", "chunked"),
    [
        ({}, False),
        (LARGE, True),
        (LARGE | {"kernels.loss": "whole"}, False),
        ({"kernels.loss": "chunked"}, True),
        (LARGE | STAGES, True),
        (STAGES, False),
        (LARGE | {"parallel.zero_stage": 3}, False),
    ],
)
def test_auto_chunks_large_logits_if_this_costs_nothing(fields, chunked):
    assert chunks_loss(small_plan(**fields)) is chunked


def test_auto_recomputes_the_logits_of_a_small_head():
    facts = {**LARGE, "model.config.vocab_size": 4096, "data.sequence_length": 8192, "parallel.zero_stage": 3}
    assert not chunks_loss(small_plan(**facts))
    assert chunks_loss(small_plan(**facts, **WIDE, **{"model.config.intermediate_size": 2048}))


def test_a_chunked_loss_takes_the_memory_of_one_chunk():
    whole, one_chunk = (logits_of(**LARGE, **{"kernels.loss": loss}) for loss in ("whole", "chunked"))
    assert whole == one_chunk == 12 * 128_000 * 8 * 128  # 1,024 tokens are left to autograd
    assert logits_of(**LONGER, **{"kernels.loss": "whole"}) == 8 * whole
    assert logits_of(**LONGER) == whole + 8 * 128_000 * 64 + 4 * 64 * 8 * 1024
    assert logits_of(**LONGER, **{"kernels.loss": "chunked", "parallel.zero_stage": 3}) == whole


def test_a_last_stage_keeps_no_logits_of_earlier_micro_batches():
    assert logits_of(**LARGE, **STAGES) == logits_of(**LARGE)
    whole = {"kernels.loss": "whole"}
    assert logits_of(**LARGE, **STAGES, **whole) == logits_of(**LARGE, **whole)


def test_recomputed_logits_are_part_of_the_predicted_time():
    def seconds(loss: str, fields: dict[str, object]) -> float:
        recipe = small_plan(**fields, **{"kernels.loss": loss, "parallel.zero_stage": 3}).recipe
        return predict(resolve(recipe, Cluster(devices_per_node=2, device="h100"))).step_s

    assert seconds("chunked", LONGER) > seconds("whole", LONGER)
    assert seconds("chunked", LARGE) == seconds("whole", LARGE)


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel.backend": "data_parallel"},
        {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
    ],
)
@pytest.mark.parametrize("loss", ["chunked", "compiled", "liger"])
def test_engines_that_need_the_logits_refuse_chunks(loss, fields):
    with pytest.raises(RecipeError, match=rf"'{loss}' is not supported with .*\n.*kernels\.loss=whole"):
        small_plan(**fields, **{"kernels.loss": loss})


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"parallel.backend": "data_parallel"}, "kernels.compiled_copies"),
        ({"model.architecture": "mixtral"}, "kernels.compiled_experts"),
    ],
)
def test_plans_that_cannot_be_compiled_are_refused(fields, rule):
    assert rule in _broken(**fields, **{"kernels.blocks": "compiled"})
    assert rule not in _broken(**fields, **{"kernels.blocks": "eager"})


def _broken(**fields) -> set[str]:
    try:
        small_plan(**fields)
    except RecipeError as error:
        return {problem.rule for problem in error.problems}
    return set()


def test_a_plan_shows_the_compiled_kernels():
    assert kernel_lines(small_plan(**{"kernels.blocks": "compiled"})) == ["kernels  layers compiled"]
    both = kernel_lines(small_plan(**{"kernels.blocks": "compiled", "kernels.loss": "compiled"}))
    assert both == ["kernels  layers compiled; loss in chunks of 1,024 tokens, compiled"]
    assert kernel_lines(small_plan()) == []
