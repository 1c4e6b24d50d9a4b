"""Experts that are separate modules, and blocks of experts that ZeRO-3 gathers as a whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llmtrain.errors import RecipeError
from llmtrain.models import build_model
from llmtrain.plan.facts.families import FAMILIES
from llmtrain.recipe import Recipe
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.moe import CONFIGS, moe_recipe
from tests.helpers.own_code import SPARSE, write_folder
from tests.helpers.traces import Trace, assert_same, engine_of, plain_run, plan_of, trace_plan

STEPS = 3


def _recipe(folder: Path, **fields: object) -> Recipe:
    model = {"architecture": None, "config": {}, "pretrained": str(folder), "trust_remote_code": True}
    sgd = {"optim.name": "sgd", "optim.lr": 0.1}
    return tiny_recipe(**{"model": {**tiny_recipe().model.model_dump(), **model}, **sgd, **fields})


def _train(rank: int, recipes: list[Recipe]) -> list[Trace]:
    return [trace_plan(plan_of(recipe, 2), STEPS, rank) for recipe in recipes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("experts"), SPARSE)


DDP = {"parallel.backend": "accelerate", "parallel.accelerate": "ddp", "parallel.zero_stage": 0}


@pytest.mark.slow
def test_an_expert_without_tokens_is_not_updated(folder):
    recipe = _recipe(folder, **DDP)
    expected = plain_run(recipe, STEPS)
    start = dict(build_model(recipe, torch.float32, torch.device("cpu")).named_parameters())
    experts = [name for name in start if ".experts." in name and name.endswith("weight")]
    unmet = [name for name in experts if np.array_equal(expected.weights[name], start[name].detach().numpy())]
    assert 0 < len(unmet) < len(experts)
    for rank, (run,) in enumerate(run_ranks(2, _train, [recipe], timeout=60)):
        assert_same(run, expected, rank)


@pytest.mark.parametrize("stage", range(4))
def test_engines_that_would_decay_unused_experts_are_refused(folder, stage):
    with pytest.raises(RecipeError) as error:
        plan_of(_recipe(folder, **{"parallel.zero_stage": stage}), 2)
    assert [problem.rule for problem in error.value.problems] == ["expert.modules"]


def _leaves(rank: int, recipes: list[Recipe]) -> list[set[str]]:
    engines = [engine_of(plan_of(recipe, 1)) for recipe in recipes]
    return [
        {
            f"{type(one).__module__}.{type(one).__name__}"
            for one in engine.model.modules()
            if getattr(one, "_z3_leaf", 0)
        }
        for engine in engines
    ]


def test_leaf_modules_of_the_configuration_are_gathered_as_a_whole():
    named = {name: family.moe_block for name, family in FAMILIES.items() if family.moe_block}
    assert named.keys() <= CONFIGS.keys()
    recipes = [moe_recipe(name, **{"parallel.expert": 1, "parallel.zero_stage": 3}) for name in named]
    assert run_ranks(1, _leaves, recipes) == [[{block} for block in named.values()]]
