"""The types of torch that a precision stands for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from llmtrain.plan.draft import COMPUTE_DTYPE, WEIGHT_DTYPE
from llmtrain.recipe import Precision

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def weight_dtype(precision: Precision) -> torch.dtype:
    """Of the weights that the forward pass reads."""
    return _DTYPES[WEIGHT_DTYPE[precision]]


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """What the forward pass runs under: autocast computes in a lower type than that of its weights."""
    computed = _DTYPES[COMPUTE_DTYPE[precision]]
    if computed == weight_dtype(precision):
        return nullcontext()
    return torch.autocast(device_type, computed)
