"""The valid groups for hpZ, and the behaviour of the engine with others."""

from __future__ import annotations

import pytest

from llmtrain.plan.draft import Draft
from llmtrain.plan.rules import LEGALITY, broken
from llmtrain.recipe.cluster import Cluster
from tests.helpers.plans_on_engine import verdict
from tests.helpers.random_plans import plan_of
from tests.helpers.small_plan import small_plan

GROUPS = {"parallel.zero_stage": 3, "parallel.hierarchical_partition": 2}
WITHOUT = "--set parallel.hierarchical_partition=1"
FSDP2 = {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (GROUPS, {}),
        (GROUPS | {"parallel.hierarchical_partition": 4}, {}),
        (GROUPS | {"parallel.sequence": 2}, {}),
        (GROUPS | {"parallel.backend": "accelerate", "parallel.accelerate": "deepspeed"}, {}),
        (
            GROUPS | {"parallel.zero_stage": 2},
            {"zero.hierarchical_stage": f"--set parallel.zero_stage=3, or {WITHOUT}"},
        ),
        (GROUPS | {"parallel.tensor": 2}, {"zero.hierarchical_groups": WITHOUT}),
        (
            GROUPS | {"parallel.hierarchical_partition": 8},
            {"zero.hierarchical_groups": "--set parallel.hierarchical_partition=4"},
        ),
        (
            GROUPS | {"parallel.hierarchical_partition": 3},
            {"zero.hierarchical_groups": "--set parallel.hierarchical_partition=4"},
        ),
        (
            GROUPS | {"parallel.offload_param": "nvme", "parallel.nvme_path": "/nvme"},
            {"zero.hierarchical_nvme": f"{WITHOUT}, or --set parallel.offload_param=cpu"},
        ),
        (GROUPS | FSDP2, {"backend.hierarchical": f"{WITHOUT}, or --set parallel.backend=deepspeed"}),
    ],
)
def test_groups_of_hierarchical_partition_are_checked(fields, expected):
    recipe = small_plan().recipe.with_(**{"batch.global_batch_size": 16, **fields})
    draft = Draft(recipe, Cluster(nodes=2, devices_per_node=4, device="h100"), small_plan().model)
    assert {problem.rule: problem.fix for problem in broken(draft, LEGALITY)[0]} == expected


REFUSED = [
    ({"parallel.zero_stage": 2}, {}, "ranks that keep parameters 2 as 1"),
    ({"parallel.hierarchical_partition": 3}, {}, "fails"),
    ({"parallel.hierarchical_partition": 4}, {}, "ignores"),
    ({"parallel.tensor": 2}, {}, "fails"),
    ({"parallel.expert": 2}, {"architecture": "mixtral"}, "fails"),
    (FSDP2, {}, "ranks that keep parameters 2 as 1"),
]


@pytest.mark.breadth
@pytest.mark.parametrize(("fields", "sizes", "words"), REFUSED)
def test_refused_plans_fail_or_deviate(fields, sizes, words):
    one = plan_of(GROUPS | fields, sizes, 4)
    assert len(one.rules) == 1
    assert (found := verdict(one))
    assert words in found
