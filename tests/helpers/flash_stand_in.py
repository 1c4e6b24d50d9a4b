"""In the place of flash-attn, which needs a GPU: a function of its signature, by explicit masks, on any device.

Everything around it is the code of `transformers` itself, which calls it with the bounds that it is given.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import flash_attention

_STATE = (
    *("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn"),
    *("_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"),
)
"""What `transformers` keeps of the library that it has found."""


def install(patch: pytest.MonkeyPatch) -> list[list[int]]:
    """Has `transformers` find it as FlashAttention 2; returns the list of the bounds that it will be called with."""
    seen: list[list[int]] = []

    def varlen(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> Tensor:
        assert cu_seqlens_q.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert int(cu_seqlens_q.diff().max()) == max_seqlen_q == max_seqlen_k
        assert int(cu_seqlens_q[-1]) == len(query)
        assert causal
        assert not dropout_p
        seen.append(cu_seqlens_q.tolist())
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        places = torch.arange(len(query))
        document = torch.bucketize(places, cu_seqlens_q, right=True)
        distance = places[:, None] - places
        allowed = (document[:, None] == document) & (distance >= 0)
        if window_size[0] >= 0:
            allowed &= distance <= window_size[0]
        scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * softmax_scale
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value.float()).to(query.dtype)

    def one_row_one_document(*states: Tensor, **named: object) -> Tensor:
        raise AssertionError("a flash kernel that is told of no documents")

    for name in _STATE:
        patch.setattr(flash, name, None)
    functions = (one_row_one_document, varlen, None, flash._pad_input, flash._unpad_input)
    patch.setattr(flash, "_lazy_imports", lambda *_, **__: functions)
    # It takes fp32 too, so nothing is looked for that tells another type.
    patch.setattr(flash_attention, "get_target_dtype", lambda *_: None)
    patch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    return seen
