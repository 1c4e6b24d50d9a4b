"""The rules of adapters on the real engine: refused plans fail or train something else."""

from __future__ import annotations

from typing import Any

import pytest

from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.rules import assemble, broken
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import take_steps
from tests.helpers.moe import moe_recipe
from tests.helpers.traces import assert_same, engine_of, plain_run

DORA = {"model.adapter": {"rank": 4, "alpha": 16.0, "dora": True}, "optim.name": "sgd", "optim.lr": 0.3}
STEPS = 3
REFUSED: dict[str, dict[str, Any]] = {
    "zero3": {"parallel.zero_stage": 3},
    "tensor": {"parallel.tensor": 2},
}
ALLOWED: dict[str, dict[str, Any]] = {
    "zero2": {"parallel.zero_stage": 2},
    "pipeline": {"parallel.pipeline": 2, "parallel.zero_stage": 1},
    "fsdp2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
}


def _draft(recipe: Recipe) -> Draft:
    return Draft(recipe, Cluster(devices_per_node=2), model_facts(recipe.model, recipe.vocab_size))


def _run(rank: int, recipe: Recipe) -> Any:
    """A run of a plan, legal or not."""
    plan = assemble(_draft(recipe))
    return take_steps(engine_of(plan), plan, range(STEPS))


def _compare(recipe: Recipe) -> None:
    alone = {"parallel.backend": "data_parallel", "parallel.zero_stage": 0}
    alone |= {f"parallel.{name}": 1 for name in ("pipeline", "tensor", "expert")}
    expected = plain_run(recipe.with_(**alone, **{"parallel.accelerate": "ddp"}), STEPS)
    for run in run_ranks(2, _run, recipe):
        assert_same(run, expected, recipe.parallel)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "zero3" else pytest.mark.breadth) for name in REFUSED]
)
def test_refused_plans_with_dora_fail(name):
    recipe = tiny_recipe(**DORA, **REFUSED[name])
    assert {problem.rule for problem in broken(_draft(recipe))[0]} == {"adapter.dora"}
    with pytest.raises(AssertionError):
        _compare(recipe)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "fsdp2" else pytest.mark.breadth) for name in ALLOWED]
)
def test_allowed_plans_with_dora_train(name):
    recipe = tiny_recipe(**DORA, **ALLOWED[name])
    assert not broken(_draft(recipe))[0]
    _compare(recipe)


@pytest.mark.slow
def test_adapters_of_transposed_layers_are_not_split():
    sizes = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    recipe = tiny_recipe(**{"model": {"architecture": "gpt2", "config": sizes}, "parallel.tensor": 2})
    assert not broken(_draft(recipe))[0]
    recipe = recipe.with_(**{"model.adapter": {"rank": 4}})
    assert {problem.rule for problem in broken(_draft(recipe))[0]} == {"adapter.conv1d"}
    with pytest.raises(AssertionError, match="has no split like that of the layer"):
        run_ranks(2, _run, recipe)


FROZEN_EXPERTS = {"model.adapter": {"rank": 4, "alpha": 16.0, "targets": ["q_proj", "o_proj"]}, "parallel.expert": 2}
SGD = {"optim.name": "sgd", "optim.lr": 0.3}


@pytest.mark.breadth
@pytest.mark.parametrize("stage", range(4))
def test_frozen_experts_are_distributed(stage):
    recipe = moe_recipe("mixtral", **FROZEN_EXPERTS, **SGD, **{"parallel.zero_stage": stage})
    assert not broken(_draft(recipe))[0]
    _compare(recipe)


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
TYPED_WRONG = {"model.adapter": {"rank": 4, "targets": ["q_proj", "v_prj"]}}


def test_a_pattern_that_matches_nothing_is_refused_before_workers_refuse_it():
    """In every family that is a chain of layers; a run would train less than the recipe says, or nothing."""
    for model, fix in (({}, "q_proj"), ({"model.architecture": "gpt2", "model.config": GPT2}, "c_attn")):
        recipe = tiny_recipe(**model, **TYPED_WRONG)
        problems = [one for one in broken(_draft(recipe))[0] if one.rule == "adapter.targets"]
        assert problems
        assert fix in problems[-1].fix
    (problem,) = broken(_draft(tiny_recipe(**TYPED_WRONG)))[0]
    assert problem.message == "'v_prj' matches no linear layer; did you mean 'v_proj'?"
    for named in (["q_proj"], ["model.layers.1.*_proj"], ["*.self_attn.[kv]_proj"], ["mlp.up_proj"]):
        assert not broken(_draft(tiny_recipe(**{"model.adapter": {"rank": 4, "targets": named}})))[0], named


def test_workers_refuse_such_a_pattern():
    with pytest.raises(AssertionError, match="v_prj matches no module"):
        run_ranks(1, _run, tiny_recipe(**TYPED_WRONG))


def test_a_note_says_that_experts_have_no_adapter():
    recipe = moe_recipe("mixtral", **{"model.adapter": {"rank": 4}})
    refused, notes = broken(_draft(recipe))
    assert not refused
    (note,) = (one for one in notes if one.rule == "adapter.without_experts")
    draft = _draft(recipe)
    experts = sum(one.elements for one in draft.facts.weights.layer(0) if one.is_expert) * draft.facts.weights.layers
    assert f"{experts:,} of {draft.facts.parameters:,} parameters are experts" in note.message
    assert not any(one.is_adapter and one.is_expert for one in draft.facts.weights.layer(0))
    assert '["experts.down_proj","experts.gate_up_proj"]' in note.message
    dense = tiny_recipe(**{"model.adapter": {"rank": 4}})
    assert not broken(_draft(dense))[1]
    named = moe_recipe("mixtral", **{"model.adapter": {"rank": 4, **FUSED}, "parallel.expert": 1})
    assert broken(_draft(named)) == ([], [])


def test_tensor_parallel_ranks_do_not_divide_the_rank_of_an_adapter():
    assert not broken(_draft(tiny_recipe(**{"model.adapter": {"rank": 3}, "parallel.tensor": 2})))[0]


FUSED = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"]}
PARAMETERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dora": ({**FUSED, "dora": True}, {}, "is not defined for adapters of parameters"),
    "dropout": ({**FUSED, "dropout": 0.1}, {}, "is not defined for adapters of parameters"),
    "near": ({"target_parameters": ["experts.gate_up"]}, {}, "did you mean 'experts.gate_up_proj'?"),
    "nothing": ({"targets": []}, {}, "adapts nothing"),
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_adapters_of_parameters_that_cannot_be_trained_are_refused(case):
    adapter, parallel, message = PARAMETERS[case]
    recipe = moe_recipe("mixtral", **{"model.adapter": {"rank": 4, **adapter}, "parallel.expert": 1, **parallel})
    (problem,) = broken(_draft(recipe))[0]
    assert message in problem.message
