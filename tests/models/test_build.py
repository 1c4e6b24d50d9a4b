"""Builds the configuration of a recipe's model."""

from __future__ import annotations

import json

import pytest
from transformers import Qwen2Config

from llmtrain.errors import RecipeError
from llmtrain.models import model_configuration
from llmtrain.recipe import ModelConfig
from tests.helpers.batches import tiny_recipe


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"'llama': .*'rms_norm_eps' expected float, got str"):
        model_configuration(tiny_recipe(**{"model.config.rms_norm_eps": "small"}))


def test_an_override_that_the_configuration_hides_is_refused(tmp_path):
    """Qwen2's layers follow `layer_types`, once they are in `config.json`."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "max_window_layers": 1}
    Qwen2Config(**sizes).save_pretrained(tmp_path)
    window = {"use_sliding_window": True, "sliding_window": 8}
    with pytest.raises(RecipeError) as caught:
        model_configuration(_from(tmp_path, **window))
    layers = ["full_attention", "sliding_attention"]
    assert f"--set 'model.config.layer_types={json.dumps(layers)}'" in caught.value.report()
    assert model_configuration(_from(tmp_path, **window, layer_types=layers)).layer_types == layers
    assert model_configuration(_from(tmp_path, rms_norm_eps=0.5)).rms_norm_eps == 0.5


def _from(folder, **config):
    return tiny_recipe(model=ModelConfig(pretrained=str(folder), config=config).model_dump())
