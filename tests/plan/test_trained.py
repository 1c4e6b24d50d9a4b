"""The parameters that a plan counts as trained are those that PEFT's modules train, name by name."""

from __future__ import annotations

import pytest
import torch

from llmtrain.models import build_model
from llmtrain.models.adapter import weight_name
from llmtrain.plan.described import model_line
from llmtrain.plan.facts.model_facts import model_facts
from llmtrain.plan.flops import backward_layers, flops_per_token, layer_costs
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import MIXTRAL, tiny_recipe
from tests.helpers.moe import GPT_OSS

UNTIED = {"model.config.tie_word_embeddings": False}
QWEN_MOE = {
    "model.architecture": "qwen3_moe",
    "model.config.num_experts": 4,
    "model.config.num_experts_per_tok": 2,
    "model.config.moe_intermediate_size": 32,
}
GPT2 = {"model.architecture": "gpt2", "model.config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256}}
MODELS = {
    "llama": {},
    "untied": UNTIED,
    "qwen3": {"model.architecture": "qwen3", "model.config.head_dim": 16},
    "olmo2": {"model.architecture": "olmo2"},
    "gemma2": {"model.architecture": "gemma2", "model.config.head_dim": 16, "model.attention": "eager"},
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN_MOE,
    "gpt_oss": {"model": GPT_OSS},
    "gpt2": GPT2,
    "phi": {"model.architecture": "phi", **UNTIED},
}
PARTS = {
    "all-linear": {"model.adapter": {"rank": 3}},
    "experts": {"model.adapter": {"rank": 3, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}},
    "routers": {
        "model.adapter": {"rank": 3, "targets": [], "target_parameters": ["1.mlp.*.down_proj", "mlp.*r.weight"]}
    },
    "dora": {"model.adapter": {"rank": 3, "dora": True, "targets": ["*.1.*proj"]}},
    "saved": {"model.adapter": {"rank": 3, "targets": ["*attn.?_proj"], "modules_to_save": ["*norm"]}},
    "named": {"model.trainable": ["*.1.*", "lm_head.*"]},
}
CASES = [
    *((name, "all-linear") for name in MODELS),
    ("mixtral", "experts"),
    ("qwen3_moe", "experts"),
    ("gpt_oss", "experts"),
    ("gpt_oss", "routers"),
    ("llama", "dora"),
    ("gpt2", "dora"),
    ("qwen3", "saved"),
    ("llama", "named"),
    ("untied", "named"),
    ("gpt2", "named"),
    ("qwen3_moe", "named"),
    ("phi", "named"),
]


@pytest.mark.parametrize(("model", "part"), CASES)
def test_trained_weights_are_those_of_the_model(model, part):
    recipe = tiny_recipe(**MODELS[model], **PARTS[part])
    facts = model_facts(recipe.model, recipe.vocab_size)
    built = build_model(recipe, torch.float32, torch.device("cpu"))
    weights = facts.weights
    counted = {f"{weights.prefix}.{n}.{one.name}": one for n in range(facts.layers) for one in weights.layer(n)}
    counted |= {one.name: one for one in (*weights.embedding, *weights.outside, *weights.head)}
    own = {weight_name(name): one for name, one in built.named_parameters()}
    assert counted.keys() == own.keys()
    for name, one in own.items():
        assert (counted[name].elements, counted[name].trained) == (one.numel(), one.requires_grad), name
    order = list(weights.of_layers(0, facts.layers, first=True, last=True))
    assert [one.elements for one in order] == [one.numel() for one in own.values()]
    trained = sum(one.numel() for one in built.parameters() if one.requires_grad)
    assert facts.trained_parameters == trained
    assert facts.parameters == sum(one.numel() for one in built.parameters())
    assert f"{trained:,} trained" in model_line(resolve(recipe, Cluster()))


def test_frozen_weights_cost_no_gradient():
    def facts(**fields):
        recipe = tiny_recipe(**UNTIED, **fields)
        return model_facts(recipe.model, recipe.vocab_size)

    whole, every = facts(), facts(**{"model.trainable": ["*"]})
    assert sum(layer_costs(whole, 32)) == sum(layer_costs(every, 32)) == flops_per_token(every, 32)
    top = facts(**{"model.trainable": ["model.layers.1.*"]})
    assert (backward_layers(whole), backward_layers(top)) == (2, 1)
    attention, layer, head = 12 * 64 * 32, whole.layer_parameters[0], 256 * 64
    # Forward only; forward and both products of the backward pass; forward and the product for the input.
    assert layer_costs(top, 32) == [2 * layer + attention / 3, 6 * layer + attention + 4 * head]
    lora = facts(**{"model.adapter": {"rank": 2}})
    added = lora.layer_parameters[0] - layer
    assert added == 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert layer_costs(lora, 32)[0] == 4 * layer + 6 * added + attention
