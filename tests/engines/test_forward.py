"""One forward pass: separate documents, sums over targets, and the loss of a router."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.data import MicroBatch
from llmtrain.engines.forward import forward
from llmtrain.models import build_model
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.model import build_tiny_model, packed_input
from tests.helpers.batches import T, tiny_recipe

CPU = torch.device("cpu")
SPLIT = 12
ATTENTION = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}
"""Of DBRX."""


@pytest.fixture(scope="module")
def model():
    return build_model(tiny_recipe(), torch.float32, CPU).eval()


def _batch(tokens: torch.Tensor, labels: torch.Tensor) -> MicroBatch:
    positions = torch.cat([torch.arange(SPLIT), torch.arange(T - SPLIT)])[None]
    return MicroBatch(input_ids=tokens, position_ids=positions, labels=labels)


def test_the_loss_of_a_document_does_not_depend_on_its_neighbour(model):
    tokens = torch.randint(0, 256, (1, T), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1).clone()
    labels[:, :SPLIT] = -100
    other = tokens.clone()
    other[:, :SPLIT] = (other[:, :SPLIT] + 7) % 256
    loss, auxiliary = forward(model, model, _batch(tokens, labels), CPU)
    assert auxiliary is None
    assert loss == forward(model, model, _batch(other, labels), CPU)[0]
    # In the document itself every earlier token matters.
    other[:, SPLIT] = (other[:, SPLIT] + 7) % 256
    assert loss != forward(model, model, _batch(other, labels), CPU)[0]


def test_the_loss_is_a_sum_over_targets(model):
    tokens = torch.randint(0, 256, (1, T), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1)
    total = forward(model, model, _batch(tokens, labels), CPU)[0]
    parts = []
    for index in range(T):
        one = torch.full_like(labels, -100)
        one[0, index] = labels[0, index]
        parts.append(forward(model, model, _batch(tokens, one), CPU)[0])
    assert sum(parts).item() == pytest.approx(total.item(), rel=1e-5)
    assert forward(model, model, _batch(tokens, torch.full_like(labels, -100)), CPU)[0] == 0


def test_the_router_loss_is_kept_if_the_model_returns_it():
    fields = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "vocab_size": 256}
    fields |= {"num_experts_per_tok": 2}
    config = AutoConfig.for_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5, **fields)
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(0, 256, (1, T))
    _, auxiliary = forward(model, model, _batch(tokens, tokens), CPU)
    theirs = model(input_ids=tokens, position_ids=_batch(tokens, tokens).position_ids, use_cache=False).aux_loss
    assert auxiliary.item() == pytest.approx(0.5 * theirs.item(), rel=1e-6)
    assert auxiliary.requires_grad


@pytest.mark.parametrize(
    ("family", "fields", "weight"),
    [
        ("jetmoe", {"aux_loss_coef": 0.25}, 0.25),
        ("dbrx", {"attn_config": ATTENTION, "ffn_config": {"moe_loss_weight": 0.125}}, 0.125),
    ],
)
def test_the_coefficient_of_the_router_loss_is_found_under_each_name(family, fields, weight):
    config = AutoConfig.for_model(family, **fields)
    attention = {"attn_config": ATTENTION} if family == "dbrx" else {}
    config = shrink_configuration(config, 2, output_router_logits=True, **attention)
    model = build_tiny_model(config, "eager")
    tokens, positions = packed_input(config)
    batch = MicroBatch(tokens, positions, labels=tokens)
    _, auxiliary = forward(model, model, batch, torch.device("cpu"))
    output = model(input_ids=tokens, position_ids=positions, use_cache=False)
    torch.testing.assert_close(auxiliary, weight * output.aux_loss)
