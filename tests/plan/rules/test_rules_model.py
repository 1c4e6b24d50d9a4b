"""Rotary types that depend on the longest position, and the names in a refusal of tensor parallelism."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.facts.families import WRAPPERS
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.rules import resolve
from llmtrain.recipe import ModelConfig
from llmtrain.recipe.cluster import Cluster
from tests.helpers.small_plan import small_plan

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}


def _problems(**fields: object) -> list[Problem]:
    try:
        resolve(small_plan().recipe.with_(**fields), Cluster(devices_per_node=2))
    except RecipeError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("rope", "declared", "length", "fixed"),
    [
        (DYNAMIC, 64, 64, None),
        (DYNAMIC, 64, 128, 64),
        (LONG, 256, 64, None),
        (LONG, 256, 128, 64),
        ({**YARN, "factor": 4.0}, 256, 128, None),
        ({"sliding_attention": DYNAMIC, "full_attention": {"rope_type": "default"}}, 64, 128, 64),
    ],
)
def test_frequencies_that_depend_on_the_micro_batch_are_refused(key, rope, declared, length, fixed):
    fields = {f"model.config.{key}": rope, "model.config.max_position_embeddings": declared}
    found = [
        one for one in _problems(**fields, **{"data.sequence_length": length}) if one.rule == "model.rotary_follows"
    ]
    assert len(found) == (fixed is not None)
    if found:
        assert f"beyond {fixed} positions" in found[0].message
        assert f"--set data.sequence_length={fixed}" in found[0].fix


@pytest.mark.parametrize(
    ("declared", "length", "told"),
    [(128, 128, []), (256, 128, ["max_position_embeddings=128"]), (128, 256, ["a larger factor"])],
)
def test_a_factor_of_yarn_that_does_not_fit_the_lengths_is_noted(declared, length, told):
    fields = {"model.config.rope_parameters": YARN, "model.config.max_position_embeddings": declared}
    recipe = small_plan().recipe.with_(**fields, **{"data.sequence_length": length})
    plan = resolve(recipe, Cluster(devices_per_node=2))
    found = [note["fix"] for note in plan.notes if note["rule"] == "model.yarn_length"]
    assert len(found) == len(told)
    assert all(word in fix for word, fix in zip(told, found, strict=True))


def test_rotary_frequencies_are_found_in_families_that_are_built():
    config = {"vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config |= {"num_key_value_heads": 2, "intermediate_size": 96, "original_max_position_embeddings": 64}
    phi = ModelConfig(architecture="phi3", config={**config, "pad_token_id": 0, "rope_parameters": LONG})
    assert model_facts(phi, 99).rotary_follows == ("longrope", 64)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mamba2"])
def test_a_family_without_sdpa_trains_with_eager_attention(family):
    """The classes of `transformers` say whether they support it."""
    fields = {"model.architecture": family, "model.config": {"num_hidden_layers": 2, "vocab_size": 512}}
    with pytest.raises(RecipeError, match=f"'{family}' of transformers does not support 'sdpa'(.|\n)*attention=eager"):
        resolve(small_plan().recipe.with_(**fields, **{"model.attention": "sdpa"}), Cluster(devices_per_node=2))
    recipe = small_plan().recipe.with_(**fields, **{"model.attention": "auto"})
    plan = resolve(recipe, Cluster(devices_per_node=2))
    assert plan.recipe.model.attention == "eager"
    config = AutoConfig.for_model(family, num_hidden_layers=2)
    with torch.device("meta"):
        assert not AutoModelForCausalLM.from_config(config)._supports_sdpa


def test_a_dbrx_that_fails_in_its_first_pass_is_refused():
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 99}
    attention = {"kv_n_heads": 2, "rope_theta": 10000.0}
    with pytest.raises(RecipeError, match="clip_qkv"):
        model_facts(ModelConfig(architecture="dbrx", config={**sizes, "attn_config": attention}), 99)
    clipped = {**sizes, "attn_config": {**attention, "clip_qkv": 8.0}}
    assert model_facts(ModelConfig(architecture="dbrx", config=clipped), 99).layers == 2


def test_what_cannot_be_done_with_the_text_model_of_a_multimodal_one_is_refused_together(tmp_path):
    text = {"model_type": "qwen3_vl_moe_text", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2}
    config = {"model_type": "qwen3_vl_moe", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    fields = {"num_labels": 2, "config": {"output_router_logits": True}}
    with pytest.raises(RecipeError) as caught:
        model_facts(ModelConfig(pretrained=str(tmp_path), **fields), 99)
    rules = ["model.classifier", "model.router_loss"]
    assert [problem.rule for problem in caught.value.problems] == rules


def test_a_multimodal_model_whose_text_model_cannot_be_trained_is_refused(tmp_path):
    assert "kosmos-2" not in WRAPPERS
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kosmos-2"}), encoding="utf-8")
    with pytest.raises(RecipeError, match="no causal language model") as caught:
        model_facts(ModelConfig(pretrained=str(tmp_path)), 99)
    assert "families_multimodal.md" in caught.value.problems[0].fix
