"""The types that a precision of a recipe stands for."""

from __future__ import annotations

import torch

_WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AUTOCAST = {"autocast_bf16": torch.bfloat16, "autocast_fp16": torch.float16}


def weight_dtype(precision: str) -> torch.dtype:
    """Type of the weights that the forward pass reads."""
    return _WEIGHTS.get(precision, torch.float32)


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Type that `torch.autocast` computes in; None where it is off."""
    return _AUTOCAST.get(precision)
