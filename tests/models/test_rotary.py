"""Rotary settings of a recipe on pretrained weights: they have the effect that their types define, or are refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmtrain.errors import RecipeError
from llmtrain.models import build_model, check_weights, rotary, stage_builder
from llmtrain.models.build import model_configuration
from llmtrain.models.hub_names import empty_model
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.plan.facts.rotary import effective_overrides, rotary_problems
from llmtrain.run_dir import forbidden_changes
from tests.helpers.batches import tiny_recipe
from tests.helpers.traces import plan_of

CPU = torch.device("cpu")
THETA = 10000.0
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 32},
}
GEMMA = {
    "model.architecture": "gemma3_text",
    "model.config": {
        **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
SLIDING = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family → a saved model."""
    made = tmp_path_factory.mktemp("saved")
    for name, fields in (("llama", {}), ("gemma3_text", GEMMA)):
        build_model(tiny_recipe(**fields), torch.float32, CPU).save_pretrained(made / name)
    return made


def _from(folder, **config):
    return tiny_recipe(**{"model": {"pretrained": str(folder), "config": config}})


def _positions(model, layer: str = ""):
    [module] = [module for module in model.modules() if hasattr(module, f"{layer}inv_freq")]
    return module.get_buffer(f"{layer}inv_freq"), getattr(module, f"{layer}attention_scaling")


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_scaling": LINEAR}, {**LINEAR, "rope_theta": THETA}),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5}, {**LINEAR, "rope_theta": 5e5}),
        ({"rope_parameters": {**YARN, "rope_theta": 5e5}}, {**YARN, "rope_theta": 5e5}),
        ({"rope_scaling": {**YARN, "truncate": False}}, {**YARN, "truncate": False, "rope_theta": THETA}),
        ({"rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 1.0}}, None),
        ({"rope_scaling": {**YARN, "beta_fast": 8, "beta_slow": 2, "attention_factor": 1.5}}, None),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, {**LLAMA3, "rope_theta": 5e5}),
    ],
)
def test_settings_have_the_effect_that_their_type_defines(given, means, folders, monkeypatch):
    """As in a model whose own configuration has them; with another base, the check of the frequencies fails."""
    recipe = _from(folders / "llama", **given)
    check_weights(recipe)
    config = model_configuration(recipe)
    assert recipe.model.config == given  # transformers adds defaults to what it gets
    means = means or {**given["rope_scaling"], "rope_theta": THETA}
    assert config.rope_parameters == means
    whole = build_model(recipe, torch.float32, CPU)
    own = AutoConfig.from_pretrained(folders / "llama").to_dict() | {"rope_parameters": means}
    other = AutoModelForCausalLM.from_config(type(config).from_dict(own))
    for model in (whole, stage_builder(recipe, 2, torch.float32, CPU)(1).model):
        frequencies, scaling = _positions(model)
        assert torch.equal(frequencies, _positions(other)[0])
        assert scaling == _positions(other)[1]
    plain, _ = _positions(AutoModelForCausalLM.from_pretrained(folders / "llama"))
    assert not torch.allclose(frequencies, plain)
    config.rope_parameters = {**means, "rope_theta": means["rope_theta"] * 1.001}
    with pytest.raises(RecipeError, match="LlamaRotaryEmbedding computes frequencies that differ"):
        rotary.check_rotary(config, {"rope_parameters": means})


def test_the_formulas_are_those_of_the_papers():
    """Of a head of 128: YaRN keeps what turns 32 times within the original length, and divides what turns once."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    values, scaling = rotary._frequencies(yarn, 128)
    plain = [1e6 ** (-pair / 64) for pair in range(64)]
    assert scaling == pytest.approx(0.1 * math.log(4) + 1)
    for value, frequency in zip(values, plain, strict=True):
        turns = 32768 * frequency / math.tau
        if turns > 32 * 1.3:  # beyond the rounding to whole pairs
            assert value == frequency
        elif turns < 1 / 1.3:
            assert value == frequency / 4
        else:
            assert frequency / 4 <= value <= frequency


def test_settings_of_each_kind_of_layer_are_compared(folders):
    full = {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 4096}
    recipe = _from(folders / "gemma3_text", rope_parameters={"sliding_attention": SLIDING, "full_attention": full})
    check_weights(recipe)
    model = build_model(recipe, torch.float32, CPU)
    assert _positions(model, "full_attention_")[1] == pytest.approx(0.1 * math.log(4) + 1)
    with pytest.raises(RecipeError, match="computes frequencies that differ"):  # transformers reads it elsewhere
        check_weights(
            _from(
                folders / "gemma3_text",
                rope_parameters={"sliding_attention": SLIDING, "full_attention": {**full, "truncate": False}},
            )
        )


@pytest.mark.parametrize(
    "scaling",
    [
        pytest.param(YARN, id="yarn"),
        pytest.param(LINEAR, id="linear", marks=pytest.mark.breadth),
        pytest.param(LLAMA3, id="llama3", marks=pytest.mark.breadth),
    ],
)
def test_the_families_of_transformers_compute_what_a_type_defines(scaling, monkeypatch):
    compared: set[str] = set()
    refused: dict[str, str] = {}
    compare = rotary._compare
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            tiny = shrink_configuration(CONFIG_MAPPING[family]().get_text_config(decoder=True), 2)
            own = tiny.rope_parameters or {}
            nested = {
                kind: {**part, "rope_theta": 5e5, **scaling} for kind, part in own.items() if isinstance(part, dict)
            }
            fields = {"rope_parameters": nested} if nested else {"rope_scaling": scaling, "rope_theta": 5e5}
            declared = tiny.to_dict()
            if not own or rotary_problems(fields, declared):
                continue
            given = effective_overrides(fields, declared)
            config = type(tiny).from_dict(declared | effective_overrides(fields, declared))
            empty_model(config, torch.float32)
        except Exception:  # foreign constructors raise anything for a tiny model
            continue
        monkeypatch.setattr(rotary, "_compare", lambda *given, name=family: (compared.add(name), compare(*given)))
        try:
            rotary.check_rotary(config, given)
        except RecipeError as error:
            refused[family] = str(error)
    assert len(compared) > 100
    assert refused.keys() <= {"granitemoehybrid", "recurrent_gemma", "zamba2"}  # these layers have none
    assert all("has no rotary frequencies" in message for message in refused.values())


@pytest.mark.parametrize(
    ("family", "given", "told"),
    [
        ("llama", {"rope_parameters": LINEAR}, "lacks rope_theta, which is 10000.0 in the model's own"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "lacks original_max_position_embeddings"),
        ("llama", {"rope_scaling": {**YARN, "beta_fats": 8}}, "beta_fats: is no rotary parameter; did you mean 'beta"),
        ("llama", {"rope_scaling": {**LINEAR, "beta_fast": 8}}, "beta_fast: is not read by 'linear'"),
        ("llama", {"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, "'yarm' is not a rope_type; did you mean"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor: must be a number of at least 1"),
        ("llama", {"rope_theta": 1e6, "rope_parameters": SLIDING}, "rope_parameters: sets what rope_theta set, too"),
        ("llama", {"rope_parameters": {"full_attention": SLIDING}}, "does not have the form"),
        ("gemma3_text", {"rope_theta": 1e6}, "has no effect on pretrained weights that have other positions in each"),
        ("gemma3_text", {"rope_parameters": SLIDING}, "does not have the form of the model's own configuration: "),
        ("gemma3_text", {"rope_parameters": {"full_attention": SLIDING}}, "lacks sliding_attention"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": SLIDING, "sliding_attention": SLIDING, "rope_theta": 1e6}},
            "rope_parameters.rope_theta: is not read beside",
        ),
    ],
)
def test_settings_without_effect_are_refused_by_the_plan(family, given, told, folders):
    with pytest.raises(RecipeError) as caught:
        plan_of(_from(folders / family, **given), 1)
    assert told in caught.value.report()


def test_parameters_of_the_model_itself_are_not_lost(folders, tmp_path):
    config = json.loads((folders / "llama" / "config.json").read_text())
    config["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept = effective_overrides({"rope_scaling": LINEAR}, config)["rope_parameters"]
    assert kept == {**LINEAR, "rope_theta": THETA, "partial_rotary_factor": 0.5}
    with pytest.raises(RecipeError, match=r"lacks partial_rotary_factor, which is 0\.5"):
        plan_of(_from(tmp_path, rope_parameters={**LINEAR, "rope_theta": THETA}), 1)
    with pytest.raises(RecipeError, match="partial_rotary_factor: has no effect"):
        plan_of(_from(tmp_path, partial_rotary_factor=1.0), 1)
    outer = {**config, "original_max_position_embeddings": 64}  # as in Phi-3
    [problem] = rotary_problems({"rope_scaling": YARN}, outer)
    assert "is not model.config.original_max_position_embeddings = 64" in problem.message


def test_a_run_does_not_continue_with_other_positions(folders):
    recipes = [_from(folders / "llama", rope_scaling=each) for each in (YARN, {**YARN, "factor": 8.0})]
    [change] = forbidden_changes(*recipes, "the run")
    assert change.field == "model.config.rope_scaling.factor"
