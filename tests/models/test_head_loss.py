"""The loss of hidden states runs in place of the head, of families whose logits are the output of their head."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from llmtrain.errors import FamilyError
from llmtrain.models import build_model
from llmtrain.models.head_loss import HeadLoss, check_head
from tests.helpers.batches import tiny_recipe


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_families_whose_logits_are_those_of_the_head_are_accepted(family):
    check_head(AutoConfig.for_model(family))


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("gemma2", {}, "it changes the logits after its head"),
        ("granite", {"logits_scaling": 2.0}, "it changes the logits after its head"),
        ("phi", {}, "its head is not a linear layer without a bias"),
    ],
)
def test_other_families_are_refused(family, fields, reason):
    with pytest.raises(FamilyError, match=f"hidden states of {family} are not available: {reason}"):
        check_head(AutoConfig.for_model(family, **fields))


def test_a_model_returns_sums_in_the_context_and_logits_outside():
    model = build_model(tiny_recipe(), torch.float32, torch.device("cpu"))
    tokens = torch.arange(8)[None]
    logits = model(tokens).logits
    at_head = HeadLoss(model)
    with at_head.computing(lambda hidden, weight: (hidden @ weight.T).sum((0, 1))):
        sums = model(tokens).logits
    torch.testing.assert_close(sums, logits.sum((0, 1)))
    assert torch.equal(model(tokens).logits, logits)
    gradients = [torch.autograd.grad(total, model.lm_head.weight)[0] for total in (sums.sum(), logits.sum())]
    torch.testing.assert_close(*gradients)
