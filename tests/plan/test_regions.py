"""The plans that divide the residual stream among tensor parallel ranks, and their description."""

from __future__ import annotations

import pytest

from llmtrain.plan.described import split_lines
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import MIXTRAL, tiny_recipe

WIDE = {"model.config.num_attention_heads": 16, "model.config.num_key_value_heads": 16}
UNPACKED = {"data.packing": "none"}


def plan_of(tensor: int, devices: int, **fields):
    recipe = tiny_recipe(**{"parallel.tensor": tensor, "parallel.zero_stage": 1, "batch.micro_batch_size": 1}, **fields)
    return resolve(recipe, Cluster(devices_per_node=devices))


@pytest.mark.parametrize(
    ("tensor", "fields", "ranks"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (2, MIXTRAL, 2),
        (2, {"model.architecture": "qwen2_moe", "model.config.num_experts": 4}, 1),
        (2, MIXTRAL | {"parallel.expert": 2}, 1),
        (2, {"parallel.tiled_mlp": True}, 1),
        (2, {"data.sequence_length": 27}, 1),
        (2, {"data.sequence_length": 26}, 2),
        (2, {"data.sequence_length": 26, "parallel.sequence": 2}, 1),
        (2, {"data.sequence_length": 28, "parallel.sequence": 2}, 2),
        (16, WIDE | UNPACKED, 1),
        (16, WIDE | UNPACKED | {"parallel.pipeline": 2}, 16),
    ],
    ids=[
        "alone",
        "two",
        "experts",
        "whole experts",
        "experts apart",
        "tiles",
        "odd",
        "even",
        "odd parts",
        "even parts",
        "short",
        "full",
    ],
)
def test_the_residual_is_divided_over_as_many_ranks_as_possible(tensor, fields, ranks):
    """Micro-batches that are shortened have a multiple of 8 tokens, which 16 ranks cannot divide."""
    degrees = tensor * fields.get("parallel.sequence", 1) * fields.get("parallel.pipeline", 1)
    plan = plan_of(tensor, degrees, **fields)
    assert plan.megatron_sp_ranks == ranks
    assert plan.summary()["megatron_sp_ranks"] == ranks
    said = [line for line in split_lines(plan) if line.startswith("residual")]
    held = "a slice of each sequence" if ranks > 1 else "each sequence whole"
    assert said == ([f"residual {held} on each of {tensor} tensor parallel ranks"] if tensor > 1 else [])
