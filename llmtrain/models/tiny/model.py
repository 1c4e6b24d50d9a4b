"""Tiny models with random weights, and their input."""

from __future__ import annotations

import math

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.models.classifier import decoder_of
from llmtrain.models.initial import draw_all_weights

TOLERANCE = 1e-5
"""Largest allowed deviation of a logit, relative to the largest logit.

Both sides compute the same fp32 operations in the same order, so results are normally equal. The tolerance allows for
kernels that choose a different algorithm for a different memory layout.
"""
CPU = torch.device("cpu")
MODEL_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
"""Exceptions that a family's own code raises if something is not as it expects."""
COPY_ERRORS = (*MODEL_ERRORS, StrictDataclassError)
"""The same, and what a configuration class raises for fields that are inconsistent."""


def build_tiny_model(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Builds the whole model in fp32 with weights that expose differences: no norm is 1, and no bias or gate is 0."""
    model = decoder_of(config, attn_implementation=attention, dtype=torch.float32)
    draw_all_weights(model, 0)
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def packed_input(config: PreTrainedConfig) -> tuple[Tensor, Tensor]:
    """Returns two sequences of 16 tokens, which hold one and two documents, and their positions; both [2, 16]."""
    size = min(config.get_text_config(decoder=True).vocab_size, 90)
    tokens = torch.randint(3, size, (2, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.arange(16), torch.arange(16) % 10])
    return tokens, positions


def relative_deviation(ours: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """Returns the largest deviation of an entry, relative to the largest expected one, or to `least` if that is larger.

    The result is infinite if the shapes differ or a deviation is not finite, because Python's `max` can drop a NaN.
    """
    if ours.shape != expected.shape:
        return math.inf
    deviation = float((ours - expected).abs().max()) / max(float(expected.abs().max()), least)
    return deviation if math.isfinite(deviation) else math.inf
