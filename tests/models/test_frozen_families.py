"""The parameters of the families of transformers without a gradient are exactly the frozen ones."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmtrain.models import target_loss_sum
from llmtrain.models.loss import freeze_unused
from llmtrain.models.tiny.model import build_tiny_model, packed_input
from llmtrain.plan.facts.built_model import INDEXERS
from tools import families

NOT_BUILT = {"blt"}
LONG = {"deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}}
"""Compressed attention begins at a number of tokens, which the tiny copy's sequences have to reach."""


def _without_gradient(family: str) -> tuple[set[str], set[str]]:
    """Names of the trained parameters that a backward pass leaves without a gradient, and of the frozen ones."""
    config = families.tiny_config(family)
    for name, value in LONG.get(family, {}).items():
        setattr(config, name, value)
    model = freeze_unused(build_tiny_model(config, "eager").train())
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    tokens, positions = packed_input(config)
    output = model(input_ids=tokens, position_ids=positions, use_cache=False)
    loss = target_loss_sum(output.logits, tokens)
    if getattr(output, "aux_loss", None) is not None:
        loss = loss + output.aux_loss
    loss.backward()
    return {name for name, one in model.named_parameters() if one.requires_grad and one.grad is None}, frozen


@pytest.mark.parametrize("family", sorted(INDEXERS))
def test_sparse_indexers_are_frozen_and_no_other_weight_lacks_a_gradient(family):
    torch.manual_seed(0)
    lacking, frozen = _without_gradient(family)
    assert lacking == set()
    assert any(INDEXERS[family] in name for name in frozen)


@pytest.mark.breadth
def test_every_other_family_has_gradients_for_all_trained_parameters():
    torch.manual_seed(0)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            if not families.out_of_scope(family) and family not in NOT_BUILT | set(INDEXERS):
                found[family] = _without_gradient(family)[0]
    assert {family: names for family, names in found.items() if names} == {}
