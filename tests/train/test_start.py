"""Faults that are found before a worker starts."""

from __future__ import annotations

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan.load import load_recipe
from llmtrain.plan.search.enumerate import enumerate_plans
from llmtrain.recipe.cluster import Cluster
from llmtrain.train.start import check_stages, runnable_plan, without_unsplittable

TINY = load_recipe("recipes/tiny.py:verify", [])[0]
PIPELINE = {"parallel.pipeline": 2, "parallel.zero_stage": 1}
UNCUT = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
ZAYA = TINY.with_(**{"model.architecture": "zaya", "model.config": UNCUT})


def test_pipelines_of_a_family_that_cannot_be_cut_are_not_verified():
    plans, refused = enumerate_plans(ZAYA, 2)
    kept, out = without_unsplittable(plans, refused)
    assert {one.plan.parallel.pipeline for one in plans} == {1, 2}
    assert {one.plan.parallel.pipeline for one in kept} == {1}
    assert [one.name for one in kept] == [one.name for one in plans if one.plan.parallel.pipeline == 1]
    moved = out[len(refused) :]
    assert {one.problem.rule for one in moved} == {"pipeline.family"}
    assert len(kept) + len(moved) == len(plans)


@pytest.mark.slow
def test_nothing_is_verified_if_no_plan_remains():
    plans, refused = enumerate_plans(ZAYA, 2)
    with pytest.raises(RecipeError) as error:
        without_unsplittable([one for one in plans if one.plan.parallel.pipeline == 2], refused)
    assert [problem.rule for problem in error.value.problems] == ["pipeline.family"]


def test_a_family_that_can_be_cut_passes():
    check_stages(runnable_plan(TINY.with_(**PIPELINE), Cluster(devices_per_node=2)))


def test_a_refused_plan_lists_the_nearest_legal_plans():
    with pytest.raises(RecipeError) as error:
        runnable_plan(TINY.with_(**PIPELINE, **{"batch.micro_batch_size": 5}), Cluster(devices_per_node=2))
    assert error.value.nearest[0] == "--set batch.micro_batch_size=4"
    assert error.value.as_dict()["nearest"] == list(error.value.nearest)
    assert error.value.report().endswith("\n".join(f"    {one}" for one in error.value.nearest))
    with pytest.raises(RecipeError) as error:
        check_stages(runnable_plan(ZAYA.with_(**PIPELINE), Cluster(devices_per_node=2)))
    assert error.value.nearest == ("--set parallel.pipeline=1",)
