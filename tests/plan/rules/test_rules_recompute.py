"""The combinations in which layers may be recomputed in the backward pass."""

from __future__ import annotations

import pytest

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules import LEGALITY, broken
from llmtrain.recipe.cluster import Cluster
from tests.helpers.small_plan import small_plan

FULL = {"parallel.activation_checkpointing": "full"}
SELECTIVE = {"parallel.activation_checkpointing": "selective"}
EVERY = {"parallel.checkpoint_every": 2}
OFFLOAD = {"parallel.offload_activations": True}
TILES = {"parallel.tiled_mlp": True}
NO_TILES = "--set parallel.tiled_mlp=false"
COMPILED = {"kernels.blocks": "compiled"}
BF16 = {"parallel.precision": "bf16", "parallel.zero_stage": 1}
INSTEAD = "--set parallel.activation_checkpointing=full"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (FULL | EVERY, {}),
        (SELECTIVE | EVERY, {}),
        (EVERY, {"recompute.every": f"{INSTEAD}, or --set parallel.checkpoint_every=1"}),
        (SELECTIVE | {"parallel.pipeline": 2, "parallel.zero_stage": 1}, {}),
        (SELECTIVE | {"parallel.tensor": 2}, {}),
        (SELECTIVE | {"parallel.zero_stage": 3}, {}),
        (SELECTIVE | {"model.attention": "varlen", **BF16}, {}),
        (SELECTIVE | COMPILED, {}),
        (SELECTIVE | COMPILED | {"model.attention": "varlen", **BF16}, {}),
        (SELECTIVE | COMPILED | {"model.attention": "flash_attention_2", **BF16}, {"recompute.selective": INSTEAD}),
        (SELECTIVE | {"kernels.blocks": "liger"}, {"recompute.selective": INSTEAD}),
        (FULL | {"kernels.blocks": "liger"}, {}),
        (SELECTIVE | {"parallel.backend": "data_parallel"}, {"recompute.selective": INSTEAD}),
        (FULL | {"parallel.backend": "data_parallel"}, {}),
        (FULL | OFFLOAD, {}),
        (FULL | OFFLOAD | {"parallel.pipeline": 2, "parallel.zero_stage": 1}, {}),
        (OFFLOAD, {"recompute.offload": INSTEAD}),
        (TILES, {}),
        (TILES | FULL | OFFLOAD | {"parallel.zero_stage": 3}, {}),
        (TILES | COMPILED, {"recompute.tiles": NO_TILES}),
        (TILES | SELECTIVE, {"recompute.tiles": NO_TILES}),
        (TILES | {"parallel.backend": "data_parallel"}, {"recompute.tiles": NO_TILES}),
        (SELECTIVE | OFFLOAD, {"recompute.offload": INSTEAD}),
        (
            FULL | OFFLOAD | {"parallel.backend": "data_parallel"},
            {"recompute.offload": "--set parallel.offload_activations=false"},
        ),
    ],
)
def test_illegal_recomputation_is_refused_with_a_fix(fields, expected):
    draft = Draft(small_plan().recipe.with_(**fields), Cluster(devices_per_node=2, device="h100"), small_plan().model)
    assert {problem.rule: problem.fix for problem in broken(draft, LEGALITY)[0]} == expected
