"""Maps a precision to torch dtypes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from llmtrain.plan.draft import COMPUTE_DTYPE, WEIGHT_DTYPE
from llmtrain.recipe import Precision

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def weight_dtype(precision: Precision) -> torch.dtype:
    """Returns the dtype of the weights that the forward pass reads."""
    return _DTYPES[WEIGHT_DTYPE[precision]]


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """Returns the context for the forward pass: autocast if it computes in a lower type than its weights have."""
    computed = _DTYPES[COMPUTE_DTYPE[precision]]
    if computed == weight_dtype(precision):
        return nullcontext()
    return torch.autocast(device_type, computed)
