"""Another head than that over the vocabulary: its families, its weights, and what cannot have one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from llmtrain.errors import CheckpointError, FamilyError, RecipeError
from llmtrain.models import build_model
from llmtrain.models.classifier import declare_head
from llmtrain.models.inference.load import load_causal_lm
from llmtrain.models.tiny import classifier_check
from llmtrain.models.tiny.classifier_check import check_classifier
from llmtrain.plan.facts.families import FAMILIES
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.rules import resolve
from llmtrain.recipe import ModelConfig
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import CLASSIFIER, tiny_recipe

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
GPT2 = {"model.architecture": "gpt2", "model.config": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}}
DECODERS = sorted(
    name
    for name, kind in CONFIG_MAPPING.items()
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
)
OTHERS = (
    *("bart", "bert", "big_bird", "bigbird_pegasus", "camembert", "cohere_compass_text", "ctrl", "data2vec-text"),
    *("electra", "ernie", "mbart", "megatron-bert", "modernbert-decoder", "mvp", "plbart", "reformer", "rembert"),
    *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet"),
    "xmod",
)
"""Their classifiers are something else than a decoder and `score`, or have no tiny copy."""
SOME = ("llama", "gpt2", "gemma2", "bloom", "mixtral")


def configuration(family):
    config = CONFIG_MAPPING[family]()
    declare_head(config, 3)
    return config


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in SOME else pytest.mark.breadth) for name in DECODERS if name not in OTHERS],
)
def test_outputs_are_the_scores_of_the_familys_classifier(family):
    check_classifier(configuration(family))


@pytest.mark.parametrize("family", ["bert", *(pytest.param(name, marks=pytest.mark.breadth) for name in OTHERS)])
def test_other_classifiers_are_refused(family):
    with pytest.raises(FamilyError, match=f"{family} cannot have another head: "):
        check_classifier(configuration(family))


def test_other_scores_are_refused(monkeypatch):
    original = classifier_check.decoder_of

    def scaled(config, **named):
        model = original(config, **named)
        model.score.register_forward_hook(lambda module, args, scores: 1.001 * scores)
        return model

    monkeypatch.setattr(classifier_check, "decoder_of", scaled)
    with pytest.raises(FamilyError, match="its classifier in transformers returns other scores, by 1e-03"):
        check_classifier(configuration("llama"))


def test_families_whose_weights_are_counted_have_a_classifier():
    assert not [name for name in FAMILIES if name not in DECODERS or name in OTHERS]


@pytest.mark.parametrize("fields", [{}, {"model.config.tie_word_embeddings": False}, GPT2], ids=["tied", "own", "gpt2"])
def test_facts_are_those_of_the_model(fields):
    recipe = tiny_recipe(**CLASSIFIER, **fields)
    facts, built = model_facts(recipe.model, recipe.vocab_size), build_model(recipe, torch.float32, CPU)
    assert facts.parameters == facts.active_parameters == sum(weight.numel() for weight in built.parameters())
    assert facts.largest_parameter == max(weight.numel() for weight in built.parameters())
    assert (facts.outputs, facts.vocab_size, facts.tied_embeddings) == (3, 256, False)
    held = facts.weights.of_layers(0, facts.layers, first=True, last=True)
    assert [weight.numel() for weight in built.parameters()] == [weight.elements for weight in held]


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_causal_lm_start_a_classifier_whose_head_is_drawn(tied, tmp_path):
    causal = build_model(tiny_recipe(**{"model.config.tie_word_embeddings": tied}), torch.float32, CPU)
    causal.save_pretrained(tmp_path)
    start = {"model.architecture": None, "model.config": {}, "model.pretrained": str(tmp_path)}
    found = build_model(tiny_recipe(**CLASSIFIER, **start), torch.float32, CPU)
    new = build_model(tiny_recipe(**CLASSIFIER), torch.float32, CPU)
    assert torch.equal(found.score.weight, new.score.weight)
    assert found.score.weight.std() > 0.01
    for name, weight in found.base_model.named_parameters():
        assert torch.equal(weight, causal.base_model.get_parameter(name)), name


def test_weights_of_a_classifier_keep_their_head(tmp_path):
    saved = build_model(tiny_recipe(**CLASSIFIER, **{"train.seed": 3}), torch.float32, CPU)
    saved.save_pretrained(tmp_path)
    assert "score.weight" in load_file(tmp_path / "model.safetensors")
    start = {"model.architecture": None, "model.config": {}, "model.pretrained": str(tmp_path)}
    found = build_model(tiny_recipe(**CLASSIFIER, **start), torch.float32, CPU)
    assert torch.equal(found.score.weight, saved.score.weight)
    with pytest.raises(RecipeError, match=r"'score.weight': \[3, 64\], not \[2, 64\]"):
        build_model(tiny_recipe(**{**CLASSIFIER, **start, "model.num_labels": 2}), torch.float32, CPU)
    with pytest.raises(RecipeError, match=r"tensors that the model does not have: score\.weight"):
        build_model(tiny_recipe(**start), torch.float32, CPU)
    with pytest.raises(CheckpointError, match=r"holds a classifier .* cannot continue texts"):
        load_causal_lm(tmp_path, False)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"objective": "language_model"}, "objective.name", "'language_model' needs logits over the vocabulary"),
        ({"samples.prompts": ["a"], "samples.every_steps": 1}, "samples.prompts", "has no logits of tokens"),
        ({"tasks.names": ["arc_easy"]}, "tasks.names", "has no probabilities of texts"),
        ({"model.adapter": {"rank": 2}}, "model.num_labels", "adapters are exported and merged as those of a"),
        ({"kernels.loss": "chunked"}, "kernels.loss", "'chunked' is not supported with model.num_labels=3"),
        (
            {"model.architecture": "mixtral", "model.config.output_router_logits": True},
            "model.num_labels",
            "computes no loss of its routers",
        ),
        ({"model.architecture": "xglm"}, "model.num_labels", "transformers has no ...ForSequenceClassification"),
        ({"model.architecture": "bert"}, "model.num_labels", "its classifier has no linear layer `score`"),
    ],
)
def test_what_needs_logits_of_tokens_is_refused(fields, field, message):
    if isinstance(fields.get("objective"), str):
        fields = {"objective.name": fields["objective"], "objective.options": {}, "objective.count": None}
    if fields.get("model.architecture") in ("xglm", "bert"):
        decodes = {"is_decoder": True} if fields["model.architecture"] == "bert" else {}
        fields = {**fields, "model.config": {"vocab_size": 256, **decodes}}
    with pytest.raises(RecipeError) as error:
        resolve(tiny_recipe(**CLASSIFIER, **fields), Cluster())
    assert any(problem.field == field and message in problem.message for problem in error.value.problems), error.value


def test_a_model_of_ones_own_has_its_own_head():
    with pytest.raises(ValueError, match="let `build` return one with that head"):
        ModelConfig(build="mine:model", num_labels=3)


def test_the_recipe_of_the_guide_is_a_plan(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    section = (ROOT / "docs/guides/finetuning.md").read_text("utf-8").partition("## Classifiers and reward models")[2]
    names = {}
    exec(section.partition("```python\n")[2].partition("```")[0], names)
    plan = resolve(names["recipe"](), Cluster())
    assert plan.model.outputs == 2
