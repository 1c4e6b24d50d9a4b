"""The plans that a refusal ends with."""

from __future__ import annotations

import random

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan.installed import check_runnable
from llmtrain.plan.rules import resolve
from llmtrain.plan.search.nearest import nearest_plans
from llmtrain.recipe import parse_assignments
from llmtrain.recipe.cluster import Cluster
from tests.helpers.random_plans import cases

FOUR = Cluster(devices_per_node=4)


def pasted(recipe, arguments: str):
    """The recipe with a suggestion as a user gives it: `--set A=B --set C=D`."""
    return recipe.with_(**parse_assignments(arguments.split()[1::2]))


def refused(recipe, cluster) -> set[str]:
    try:
        check_runnable(resolve(recipe, cluster))
    except RecipeError as error:
        return {problem.rule for problem in error.problems}
    return set()


def drawn(draw: random.Random) -> dict[str, object]:
    """A few fields of a layout, legal or not."""
    choices = {
        "parallel.pipeline": [1, 1, 2, 3, 4, 8],
        "parallel.tensor": [1, 1, 1, 2, 3],
        "parallel.sequence": [1, 1, 1, 2, 5],
        "parallel.expert": [1, 1, 1, 2],
        "parallel.zero_stage": [0, 1, 2, 3],
        "parallel.precision": ["fp32", "bf16", "fp16", "autocast_bf16", "autocast_fp16"],
        "parallel.grad_accum_dtype": ["fp32", "fp32", "bf16", "fp16"],
        "parallel.offload_optimizer": ["none", "none", "cpu", "nvme"],
        "parallel.offload_param": ["none", "none", "cpu", "nvme"],
        "parallel.nvme_path": [None, None, "/nvme"],
        "batch.global_batch_size": [8, 12, 30, 64],
        "batch.micro_batch_size": [1, 2, 3, 5, 16],
        "optim.clip_grad_norm": [0.0, 1.0],
    }
    return {field: draw.choice(values) for field, values in choices.items()}


@pytest.mark.parametrize("count", [25, pytest.param(150, marks=pytest.mark.breadth)])
def test_each_suggestion_is_a_plan_of_the_same_run(tiny, count):
    draw, helped, tried = random.Random(5), 0, 0
    for _ in range(count):
        recipe = tiny.with_(**drawn(draw))
        cluster = Cluster(devices_per_node=draw.choice([1, 2, 4, 6, 8]), device=draw.choice(["cpu", "h100"]))
        if not refused(recipe, cluster):
            continue
        tried += 1
        suggestions = nearest_plans(recipe, cluster)
        helped += bool(suggestions)
        assert len(set(suggestions)) == len(suggestions) <= 3
        for arguments in suggestions:
            other = pasted(recipe, arguments)
            assert not refused(other, cluster), arguments
            same = {"parallel": recipe.parallel, "batch": recipe.batch}
            assert other.model_copy(update=same) == recipe, arguments
            assert other.batch.global_batch_size == recipe.batch.global_batch_size
    assert tried > count * 2 / 3
    assert helped > 0.9 * tried, (helped, tried)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"parallel.pipeline": 2, "parallel.zero_stage": 3}, "--set parallel.zero_stage=1"),
        ({"parallel.pipeline": 3, "parallel.zero_stage": 1}, "--set parallel.pipeline=4"),
        ({"batch.micro_batch_size": 3}, "--set batch.micro_batch_size=4"),
        ({"parallel.precision": "bf16"}, "--set parallel.zero_stage=1"),
        ({"parallel.offload_param": "nvme"}, "--set parallel.offload_param=none"),
        ({"parallel.nvme_path": "/nvme"}, "--set parallel.nvme_path=null"),
        # Two faults, one of them in a field that the fix of the other one changes.
        (
            {"parallel.pipeline": 8, "parallel.zero_stage": 0},
            "--set parallel.zero_stage=1 --set parallel.pipeline=4",
        ),
    ],
)
def test_the_nearest_plan_changes_the_faulty_field(tiny, fields, expected):
    assert nearest_plans(tiny.with_(**{"batch.micro_batch_size": 4, **fields}), FOUR)[0] == expected


def test_a_batch_that_the_devices_do_not_divide_asks_for_fewer_replicas(tiny):
    recipe = tiny.with_(**{"batch.global_batch_size": 10, "batch.micro_batch_size": 1})
    assert nearest_plans(recipe, FOUR)[0] == "--set parallel.sequence=2"


@pytest.mark.parametrize(
    "fields",
    [
        {"model.config.vocab_size": 100},
        {"model.config.hiden_size": 3},
        {"model.architecture": None, "model.pretrained": "/nowhere"},
    ],
)
def test_faults_that_no_layout_fixes_have_no_suggestion(tiny, fields):
    recipe = tiny.with_(**fields, **{"parallel.pipeline": 2, "parallel.zero_stage": 3})
    assert refused(recipe, FOUR)
    assert nearest_plans(recipe, FOUR) == ()


def test_necessary_changes_are_in_each_suggestion(tiny):
    recipe = tiny.with_(**{"parallel.pipeline": 4, "parallel.zero_stage": 1, "batch.global_batch_size": 8})
    (first, *_) = nearest_plans(recipe, FOUR, {"parallel.pipeline": 1})
    assert first == "--set batch.micro_batch_size=2 --set parallel.pipeline=1"


def test_a_large_cluster_takes_no_long_time(tiny):
    recipe = tiny.with_(**{"parallel.tensor": 3, "parallel.pipeline": 16, "batch.global_batch_size": 5040})
    nearest_plans(recipe, Cluster(nodes=10**6, devices_per_node=7, device="h100"))


@pytest.mark.parametrize("count", [25, pytest.param(160, marks=pytest.mark.breadth)])
def test_plans_close_to_legal_ones_have_suggestions(count):
    """Over every field that the rules speak of, backends and models among them."""
    tried = helped = 0
    for one in cases(11, count, [1, 2, 4]):
        recipe, cluster = one.draft.recipe, one.draft.cluster
        if not one.rules:
            assert nearest_plans(recipe, cluster) == ()
            continue
        suggestions = nearest_plans(recipe, cluster)
        tried += 1
        helped += bool(suggestions)
        for arguments in suggestions:
            other = pasted(recipe, arguments)
            assert not refused(other, cluster), (one.told, arguments)
            assert other.batch.global_batch_size == recipe.batch.global_batch_size
            assert (other.model, other.data, other.optim) == (recipe.model, recipe.data, recipe.optim)
    assert helped > 0.9 * tried, (helped, tried)
