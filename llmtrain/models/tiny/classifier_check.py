"""Verifies on a tiny copy of a model that the outputs of its last token are those of the family's classifier."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from llmtrain.models.classifier import decoder_of, no_classifier
from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.models.tiny.model import COPY_ERRORS, TOLERANCE, packed_input, relative_deviation
from llmtrain.plan.facts.classifier import MODULE


def check_classifier(config: PreTrainedConfig) -> None:
    """Raises FamilyError unless an export of a classifier of `config` gives the scores with which it was trained.

    The random state is preserved.
    """
    try:
        tiny = shrink_configuration(config)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = decoder_of(tiny, attn_implementation="eager", dtype=torch.float32).eval()
            head = getattr(model, MODULE, None)
            if not isinstance(head, nn.Linear) or head.bias is not None:
                raise no_classifier(config, f"its classifier has no linear layer `{MODULE}` without a bias")
            family = AutoModelForSequenceClassification.from_config(tiny, attn_implementation="eager").eval()
            family.load_state_dict(model.state_dict())
            tokens = packed_input(tiny)[0][:1]
            ours = model(tokens, torch.arange(tokens.shape[1])[None]).logits[:, -1]
            deviation = relative_deviation(ours, family(tokens).logits)
    except COPY_ERRORS as error:
        raise no_classifier(config, f"its tiny copy does not run ({type(error).__name__}: {error})") from error
    if deviation > TOLERANCE:
        raise no_classifier(config, f"its classifier in transformers returns other scores, by {deviation:.0e}")
