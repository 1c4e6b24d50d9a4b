"""The state of every plan is saved, loaded and exported, for each family whose experts can be distributed."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.errors import CheckpointError
from llmtrain.recipe import Recipe
from llmtrain.trials.verify.compare import clone
from llmtrain.trials.verify.round_trip import check_checkpoint_round_trip
from tests.helpers.batches import step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.moe import CONFIGS, moe_recipe
from tests.helpers.own_optimizer import AVERAGING
from tests.helpers.traces import engine_of, plan_of


def _check(rank: int, recipe: Recipe, folder: Path, spoilt: str = "", steps: int = 1) -> str:
    plan = plan_of(recipe, 2)
    engine = engine_of(plan)
    for step in range(steps):
        engine.train_step(step_batch(step, 1, 4, rank, 2))
    weights = clone(dict(engine.named_weights()))
    for name in weights:
        if spoilt and name.endswith(spoilt):
            weights[name] += 1
    try:
        check_checkpoint_round_trip(engine, plan, weights, folder)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.breadth)])
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family == "deepseek_v3" else pytest.mark.breadth) for family in sorted(CONFIGS)],
)
def test_distributed_experts_are_saved_loaded_and_exported(family, stage, tmp_path):
    recipe = moe_recipe(family, **{"parallel.zero_stage": stage})
    assert run_ranks(2, _check, recipe, tmp_path / "saved") == ["", ""]
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_averages_of_ones_own_optimizer_are_exported(stage, tmp_path):
    """Bit for bit those of the engine; the trained weights are others."""
    recipe = tiny_recipe(**AVERAGING, **{"parallel.zero_stage": stage})
    assert run_ranks(2, _check, recipe, tmp_path / "saved", "", 3) == ["", ""]


def test_deviating_values_are_detected(tmp_path):
    recipe = moe_recipe("mixtral", **{"parallel.expert": 1, "parallel.zero_stage": 0})
    with pytest.raises(AssertionError, match="has other values in the checkpoint"):
        run_ranks(2, _raise, recipe, tmp_path / "saved")


def _raise(rank: int, recipe: Recipe, folder: Path) -> None:
    if reason := _check(rank, recipe, folder, "lm_head.weight"):
        raise AssertionError(reason)
