"""The stages in a plan are those that the workers build."""

from __future__ import annotations

import pytest

from llmtrain.plan.described import describe_stages
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.flops import flops_per_token, layer_costs
from llmtrain.plan.rules import resolve
from llmtrain.plan.stages import plan_stages, stage_bounds
from llmtrain.recipe import ModelConfig
from llmtrain.recipe.cluster import Cluster

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama": SMALL,
    "llama tied": {**SMALL, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 32},
    "mixtral": {**SMALL, "num_local_experts": 4},
    "qwen3_moe": {**SMALL, "num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "phi3": {**SMALL, "pad_token_id": 0},
}


def facts_of(name: str):
    return model_facts(ModelConfig(architecture=name.split()[0], config=MODELS[name]), None)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_the_parameters_of_a_stage_are_those_that_a_worker_builds(tiny, name, stages):
    import torch

    from llmtrain.models import stage_builder

    recipe = tiny.with_(
        **{"model.architecture": name.split()[0], "model.config": MODELS[name], "parallel.pipeline": stages},
        **{"parallel.zero_stage": 1, "batch.global_batch_size": 40, "data.tokenizer": "none"},
        **{"data.sequence_length": 32},
    )
    plan = resolve(recipe, Cluster(devices_per_node=stages))
    build = stage_builder(recipe, stages, torch.float32, torch.device("cpu"))
    for index, planned in enumerate(plan.stages):
        built = build(index)
        first, last = planned.layers
        assert (built.cut.bounds[index].first, built.cut.bounds[index].end) == (first, last + 1)
        assert sum(parameter.numel() for parameter in built.parameters()) == planned.parameters


@pytest.mark.parametrize("name", MODELS)
def test_costs_are_the_flops_of_the_model(name):
    facts = facts_of(name)
    outside = facts.parameters - sum(facts.layer_parameters) - facts.embedding_parameters
    norm = outside - (0 if facts.tied_embeddings else facts.vocab_size * facts.hidden_size)
    assert sum(layer_costs(facts, 128)) == flops_per_token(facts, 128) - 6 * norm
    assert sum(stage.cost_share for stage in plan_stages(facts, 3, 128)) == pytest.approx(1)


def test_the_last_stage_has_fewer_layers_unless_sequences_are_long():
    facts = model_facts(
        ModelConfig(architecture="llama", config={**SMALL, "vocab_size": 4096, "num_hidden_layers": 16}), None
    )
    short, long = (stage_bounds(facts, 4, length)[-1] for length in (64, 65536))
    assert short.end - short.first < 4
    assert long.end - long.first == 4


def test_inactive_experts_are_not_counted_as_work():
    """A dense first layer as wide as eight experts weighs like the layers of which a token meets eight of 64."""
    config = {**SMALL, "intermediate_size": 128, "moe_intermediate_size": 16, "num_experts": 64}
    config |= {"num_experts_per_tok": 8, "mlp_only_layers": [0, 1, 2, 3], "num_hidden_layers": 8}
    facts = model_facts(ModelConfig(architecture="qwen3_moe", config=config), None)
    bounds = stage_bounds(facts, 2, 64)
    assert [bound.end - bound.first for bound in bounds] == [4, 4]


def test_no_pipeline_has_no_stages(tiny):
    assert resolve(tiny, Cluster()).stages == ()
    assert "stages" not in resolve(tiny, Cluster()).summary()["layout"]


def test_json_contains_the_stages(tiny):
    recipe = tiny.with_(**{"parallel.pipeline": 2, "parallel.zero_stage": 1})
    stages = resolve(recipe, Cluster(devices_per_node=2)).summary()["layout"]["stages"]
    assert [stage["layers"] for stage in stages] == [[0, 1], [2, 3]] or stages[0]["layers"] == [0, 2]
    assert stages[0].keys() == {"layers", "parameters", "cost_share"}
    # The tied table lies on both.
    assert sum(stage["parameters"] for stage in stages) == 2_410_176 + 4096 * 192


def test_equal_stages_share_a_line():
    stages = plan_stages(
        model_facts(ModelConfig(architecture="llama", config={**SMALL, "num_hidden_layers": 8}), None), 4, 64
    )
    first, middle, last = describe_stages(stages)
    assert (
        first
        == f"stage 0         layers 0 to 1, {stages[0].parameters:,} parameters, {stages[0].cost_share:.1%} of the work"
    )
    assert middle.startswith("stages 1 to 2   layers 2 to 5; each 2 layers, ")
    assert last.startswith("stage 3         layers 6 to 7, ")
