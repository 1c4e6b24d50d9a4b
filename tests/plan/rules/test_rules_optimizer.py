"""The options of optimizers."""

from __future__ import annotations

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan.optimizers import OPTIMIZERS, optimizer_of
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import tiny_recipe


def _refused(**fields) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        resolve(tiny_recipe(**fields), Cluster())
    assert {problem.rule for problem in caught.value.problems} == {"optim.options"}
    return {problem.field: f"{problem.message} {problem.fix}" for problem in caught.value.problems}


def test_all_invalid_options_are_named_at_once():
    options = {"ns_stepz": 5, "momentum": 2.0, "nesterov": "yes", "ns_steps": 100, "adjust_lr_fn": "none"}
    found = _refused(**{"optim.name": "muon", "optim.options": options})
    assert found.keys() == {f"optim.options.{name}" for name in options}
    assert "did you mean 'ns_steps'?" in found["optim.options.ns_stepz"]
    assert "2.0 is invalid: must be less than 1" in found["optim.options.momentum"]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_option_of_another_optimizer_is_refused(name):
    other = "ns_steps" if name != "muon" else "decay_rate"
    assert _refused(**{"optim.name": name, f"optim.options.{other}": 5}).keys() == {f"optim.options.{other}"}


def test_options_reach_the_optimizer():
    plan = resolve(tiny_recipe(**{"optim.name": "muon", "optim.options.ns_steps": 6}), Cluster())
    optim = plan.recipe.optim
    assert optimizer_of(optim).arguments(optim)["ns_steps"] == 6


FREE = {"optim.name": "schedule_free_adamw", "optim.schedule": "constant"}
KTO = {"objective.name": "kto", "data.packing": "none", "data.sources": [{"name": "labelled.jsonl"}]}


@pytest.mark.parametrize(
    ("fields", "rule"),
    [({"optim.betas": [0.0, 0.9]}, "optim.schedule_free_mean"), (KTO, "optim.schedule_free_kto")],
    ids=["betas", "kto"],
)
def test_what_schedule_free_adamw_cannot_do_is_refused(fields, rule):
    resolve(tiny_recipe(**fields), Cluster())
    resolve(tiny_recipe(**FREE), Cluster())
    with pytest.raises(RecipeError) as caught:
        resolve(tiny_recipe(**FREE, **fields), Cluster())
    assert [problem.rule for problem in caught.value.problems] == [rule]


def test_a_decaying_rate_with_schedule_free_adamw_is_noted():
    for schedule, noted in (("constant", False), ("cosine", True)):
        notes = resolve(tiny_recipe(**FREE | {"optim.schedule": schedule}), Cluster()).notes
        assert any("needs no decay" in str(one) for one in notes) is noted


def test_moments_in_8_bit_are_refused_on_disks_only():
    fields = {"optim.name": "adamw_8bit", "parallel.zero_stage": 3}
    resolve(tiny_recipe(**fields, **{"parallel.offload_optimizer": "cpu"}), Cluster())
    disk = {"parallel.offload_optimizer": "nvme", "parallel.nvme_path": "/local_nvme"}
    resolve(tiny_recipe(**disk, **{"parallel.zero_stage": 3}), Cluster())
    with pytest.raises(RecipeError) as caught:
        resolve(tiny_recipe(**fields, **disk), Cluster())
    assert [problem.rule for problem in caught.value.problems] == ["optim.adamw_8bit_nvme"]
