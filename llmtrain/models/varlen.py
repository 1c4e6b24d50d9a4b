"""Attention over packed documents, given their boundaries instead of a mask: torch's kernel or one document at a time.

The arguments (`Documents.arguments`) have the names under which `transformers` passes boundaries through its models to
a flash kernel. This attention and a flash kernel therefore receive them in the same way, and a recomputed layer
receives those of its own micro-batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from llmtrain.errors import Problem, RecipeError

VARLEN = "varlen"
"""Name of the attention implementation in recipes and in `transformers`."""
KERNEL_TYPES = (torch.bfloat16, torch.float16)
"""The dtypes that torch's kernel supports."""
KERNEL_STEP = 8
"""The kernel requires head sizes that are multiples of this number."""
OLDEST_GPU = (8, 0)
"""Least compute capability of flash kernels and of torch's copy: Ampere's (`flash_api.cpp` of both)."""
NEWEST_GPU = {"flash_attention_3": (10, 0)}
"""Compute capability from which on there is no machine code (`hopper/setup.py` in flash-attn's source)."""
_UNSUPPORTED = {
    "softcap": "caps its scores",
    "s_aux": "has attention sinks",
    "position_bias": "adds a bias to its scores",
    "cache": "reads a cache",
}
"""Arguments of an attention function that neither implementation supports, and what a model that passes them does."""


def takes_bounds(attention: str) -> bool:
    """Returns whether an attention implementation separates documents by their boundaries instead of a mask."""
    return attention == VARLEN or bool(is_flash_attention_requested(requested_attention_implementation=attention))


def check_device(attention: str, device: torch.device) -> None:
    """Raises RecipeError if an NVIDIA GPU is none of those that a kernel without masks is compiled for.

    Rules refuse what the catalogue of devices tells; a GPU that is not in it is asked here.
    """
    if device.type != "cuda" or torch.version.hip is not None or not takes_bounds(attention):
        return
    found = torch.cuda.get_device_capability(device)
    newest = NEWEST_GPU.get(attention)
    if found >= OLDEST_GPU and (newest is None or found < newest):
        return
    least, own = (".".join(map(str, one)) for one in (OLDEST_GPU, found))
    most = f", and lower than {newest[0]}.{newest[1]}" if newest else ""
    message = (
        f"'{attention}' was given, whose kernel takes compute capability {least} or more{most}: this GPU has {own}"
    )
    raise RecipeError(Problem("model.attention_device", "model.attention", message, "--set model.attention=sdpa"))


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function for `transformers`: causal within each document.

    query, key, value: [batch, heads, T, head_dim], where key and value may have fewer heads; cu_seq_lens_q,
    max_length_q: see `Documents.arguments`. Returns [batch, T, heads, head_dim]. Raises ValueError for unsupported
    kinds of attention.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse(query, key, attention_mask, dropout, causal, others)
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError("the bounds of the documents do not reach its attention")
    rows, _, length, width = query.shape
    states = (_joined(query), _joined(key), _joined(value))
    scale = 1 / math.sqrt(width) if scaling is None else scaling
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    if query.is_cuda:
        output = _by_kernel(*states, cu_seq_lens_q, max_length_q, scale, window)
    else:
        output = _one_by_one(*states, cu_seq_lens_q, scale, window)
    return output.view(rows, length, *output.shape[1:]), None


def no_mask(*sizes: Any, attention_mask: Tensor | None = None, use_vmap: bool = False, **others: Any) -> None:
    """Returns no mask when `transformers` asks for one. Raises ValueError if the model needs its own mask."""
    if attention_mask is not None or use_vmap:
        raise ValueError("it has a mask of its own")


def _refuse(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, causal: bool, others: dict[str, Any]
) -> None:
    reasons = [why for name, why in _UNSUPPORTED.items() if others.get(name) is not None]
    if dropout:
        reasons.append(f"drops {dropout:g} of its attention, which the kernel cannot")
    if mask is not None:
        reasons.append("has a mask of its own")
    if not causal or query.shape[2] != key.shape[2]:
        reasons.append("attends to more than the tokens before one")
    if reasons:
        raise ValueError("it " + " and ".join(reasons))


def _joined(states: Tensor) -> Tensor:
    """Reshapes [batch, heads, T, dim] to [batch · T, heads, dim], in the dtype that autocast would compute in."""
    device = states.device.type
    if torch.is_autocast_enabled(device):
        states = states.to(torch.get_autocast_dtype(device))
    return states.transpose(1, 2).flatten(0, 1)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Runs torch's kernel, which requires equal head sizes that are multiples of 8.

    Padding with zeros changes neither scores nor sums.
    """
    if query.dtype not in KERNEL_TYPES:
        raise ValueError(f"the kernel computes in bf16 or fp16, and was given {query.dtype}")
    width, kept = query.shape[-1], value.shape[-1]
    padded = -(-max(width, kept) // KERNEL_STEP) * KERNEL_STEP
    query, key, value = (functional.pad(one, (0, padded - one.shape[-1])) for one in (query, key, value))
    output = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)  # without the log-sum-exp
    return output[..., :kept]


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, window: int | None) -> Tensor:
    """Computes attention document by document where no kernel is available.

    It uses `torch.split` because the gradient of each slice would be as long as all tokens.
    """
    lengths = bounds.diff().tolist()
    outputs = []
    for parts in zip(*(torch.split(one, lengths) for one in (query, key, value)), strict=True):
        one, other, third = (part.transpose(0, 1)[None] for part in parts)
        band = _band(one.shape[2], window, one.device) if window is not None and window < one.shape[2] else None
        attended = functional.scaled_dot_product_attention(
            one,
            other,
            third,
            attn_mask=band,
            is_causal=band is None,
            scale=scale,
            enable_gqa=one.shape[1] != other.shape[1],
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Returns the mask [length, length] with which each token attends to the last `window` tokens, including itself."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


ALL_ATTENTION_FUNCTIONS.register(VARLEN, varlen_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(VARLEN, no_mask)
