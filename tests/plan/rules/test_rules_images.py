"""Models that read images: what is refused with them, all at once, and what a plan says of the tower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from llmtrain.errors import RecipeError
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.rules import resolve
from llmtrain.recipe import ModelConfig
from llmtrain.recipe.cluster import Cluster
from llmtrain.trials.dry_run.model import tiny_model
from llmtrain.trials.verify.job import comparable
from tests.helpers.image_chats import image_recipe, save_image_model


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    return image_recipe(save_image_model(folder / "model", "qwen3_vl"), folder, [])


REFUSED = {
    "parallel.pipeline": 2,
    "parallel.tensor": 2,
    "parallel.sequence": 2,
    "parallel.tiled_mlp": True,
    "model.attention": "varlen",
    "kernels.blocks": "compiled",
    "kernels.loss": "liger",
    "samples.prompts": ["Once"],
    "data.special_tokens": "parse",
}


def test_what_text_models_alone_support_is_refused_together(recipe):
    with pytest.raises(RecipeError) as caught:
        resolve(recipe.with_(**REFUSED), Cluster(devices_per_node=8))
    found = {problem.field: problem for problem in caught.value.problems if problem.rule.startswith("model.images")}
    assert found.keys() == {*REFUSED, "model.images"} - {"samples.prompts", "data.special_tokens"}
    assert "samples.prompts" in found["model.images"].message
    assert "data.special_tokens" in found["model.images"].message
    with pytest.raises(RecipeError, match=r"horovod' is not supported with model\.images"):
        resolve(recipe.with_(**{"parallel.backend": "horovod"}), Cluster(devices_per_node=2))
    text = {"model.images": False, "parallel.pipeline": 2, "parallel.zero_stage": 1}
    assert resolve(recipe.with_(**text), Cluster(devices_per_node=2)).model.tower is None


def test_quantized_weights_are_refused(recipe, tmp_path):
    config = json.loads((Path(recipe.model.pretrained) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(RecipeError, match=r"model\.images: is not supported: .* is quantized"):
        resolve(recipe.with_(**{"model.pretrained": str(tmp_path)}), Cluster())


def test_trials_on_texts_are_refused(recipe):
    for tried in (lambda: comparable(recipe, 4), lambda: tiny_model(recipe, 2)):
        with pytest.raises(RecipeError, match=r"--set model\.images=false"):
            tried()


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "trained"),
        ({"model.trainable": ["model.language_model.*"]}, "frozen"),
        ({"model.trainable": ["model.visual.merger.*", "lm_head.*"]}, "of them trained"),
        ({"model.adapter": {"rank": 2}}, "frozen"),
    ],
    ids=str,
)
def test_a_plan_counts_the_tower(recipe, fields, state):
    plan = resolve(recipe.with_(**fields), Cluster())
    assert plan.model.tower is not None
    (note,) = [note["message"] for note in plan.notes if note["rule"] == "model.tower"]
    assert f"({plan.model.tower.parameters:,} parameters, " in note
    assert f"{state})" in note
    text = resolve(recipe.with_(**{"model.images": False}), Cluster()).model
    adapters = 0 if "model.adapter" not in fields else plan.model.trained_parameters
    assert plan.model.parameters == text.parameters + plan.model.tower.parameters + adapters


def test_other_families_and_fields_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3"}), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"'mistral3' .* is not trained on images, only gemma4, llama4, qwen3_5"):
        model_facts(ModelConfig(pretrained=str(tmp_path), images=True), None)
    with pytest.raises(ValidationError, match="`images` needs the `pretrained` weights"):
        ModelConfig(architecture="llama", images=True)
    with pytest.raises(ValidationError, match="`images` cannot be combined with num_labels, new_tokens"):
        ModelConfig(pretrained="x", images=True, num_labels=2, new_tokens=["<a>"])
