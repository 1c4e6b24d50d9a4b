"""ZeRO-3 gathers experts that are modules of their own with their block, since ranks reach other ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from batches import GLOBAL_BATCH, tiny_recipe
from harness import run_ranks
from moe import CONFIGS, moe_recipe
from traces import Trace, assert_same, engine_of, plan_of, reference_of, trace, trace_plan

from llmtrain.plan.families import FAMILIES
from llmtrain.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from own_code import write_folder

STEPS = 3
SPARSE = {
    "own_of_the_tests": "own_with_experts",
    "self.up = nn.Linear(width, 2 * width)": (
        "self.gate = nn.Linear(width, 16)\n"
        "        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(16)])"
    ),
    "        self.down = nn.Linear(2 * width, width)\n": "",
    "self.down(nn.functional.gelu(self.up(hidden)))": (
        "self.mixed(hidden)\n\n"
        "    def mixed(self, hidden):\n"
        "        weight, chosen = self.gate(hidden).softmax(-1).max(-1)\n"
        "        out = torch.zeros_like(hidden)\n"
        "        for number in chosen.unique().tolist():\n"
        "            met = chosen == number\n"
        "            out[met] = self.experts[number](hidden[met]) * weight[met][:, None]\n"
        "        return out"
    ),
}
"""A model of own code whose tokens each run one of 16 modules."""


def _recipe(folder: Path) -> Recipe:
    model = {"architecture": None, "config": {}, "pretrained": str(folder), "trust_remote_code": True}
    fields = {"optim.name": "sgd", "optim.lr": 0.1, "parallel.zero_stage": 3}
    return tiny_recipe(**{"model": {**tiny_recipe().model.model_dump(), **model}, **fields})


def _train(rank: int, recipe: Recipe) -> Trace:
    return trace_plan(plan_of(recipe, 2), STEPS, rank)


def _train_unmarked(rank: int, recipe: Recipe) -> Trace:
    from llmtrain.engines import deepspeed

    deepspeed.gather_experts_together = lambda model: []
    return _train(rank, recipe)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    return _recipe(write_folder(tmp_path_factory.mktemp("experts"), SPARSE))


def test_ranks_that_reach_other_experts_train_on(recipe):
    expected = trace(reference_of(recipe), range(STEPS), 1, GLOBAL_BATCH)
    for rank, run in enumerate(run_ranks(2, _train, recipe, timeout=60)):
        assert_same(run, expected, rank)


@pytest.mark.slow
def test_unmarked_they_wait_for_ever(recipe):
    # Or gloo ends a rank, when tensors of other sizes meet than it was told of.
    with pytest.raises((TimeoutError, AssertionError), match=r"did not finish|died without a word"):
        run_ranks(2, _train_unmarked, recipe, timeout=30)


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


def test_blocks_that_the_configuration_names_are_gathered_as_a_whole():
    named = {name: family.moe_block for name, family in FAMILIES.items() if family.moe_block}
    assert named.keys() <= CONFIGS.keys()
    recipes = [moe_recipe(name, **{"parallel.expert": 1, "parallel.zero_stage": 3}) for name in named]
    assert run_ranks(1, _leaves, recipes) == [[{block} for block in named.values()]]
