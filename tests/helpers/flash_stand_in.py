"""A stand-in for flash-attn, which needs a GPU: a function with its signature that uses explicit masks, on any device.

Everything around it is the code of `transformers` itself, which calls it with the bounds that it is given.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

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
"""Where `transformers` keeps the functions of the library that it has found."""


FACTS = json.loads(Path(__file__).with_name("flash_attn.json").read_text(encoding="utf-8"))
"""Written by `tools/flash_attn.py` from the source of flash-attn."""


def signature_of(attention: str) -> inspect.Signature:
    """Returns the signature of the function for documents of several lengths."""
    kind, required = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    return inspect.Signature(
        inspect.Parameter(name, kind, default=required if default is None else ast.literal_eval(default))
        for name, default in FACTS[attention]["parameters"].items()
    )


def install(patch: pytest.MonkeyPatch, attention: str = "flash_attention_2") -> list[list[int]]:
    """Lets `transformers` find the stand-in as FlashAttention; returns a list that records the bounds of each call."""
    seen: list[list[int]] = []
    signature = signature_of(attention)

    def varlen(*states: Tensor, **named: object) -> Tensor:
        given = signature.bind(*states, **named)  # raises as the function itself would
        given.apply_defaults()
        return attend(**given.arguments)

    varlen.__signature__ = signature  # `transformers` looks which arguments it takes

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        **others: object,
    ) -> Tensor:
        for name, value in others.items():
            assert value == signature.parameters[name].default, name
        for bounds in (cu_seqlens_q, cu_seqlens_k):
            assert str(bounds.dtype) == f"torch.{FACTS['limits']['bounds'].lower()}"
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert int(cu_seqlens_q.diff().max()) == max_seqlen_q == max_seqlen_k
        assert int(cu_seqlens_q[-1]) == len(q)
        assert k.shape == v.shape
        assert q.shape[-1] == k.shape[-1] <= FACTS["limits"]["largest_head"]
        assert causal
        seen.append(cu_seqlens_q.tolist())
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        places = torch.arange(len(q))
        document = torch.bucketize(places, cu_seqlens_q, right=True)
        distance = places[:, None] - places
        allowed = (document[:, None] == document) & (distance >= 0)
        if window_size[0] >= 0:
            allowed &= distance <= window_size[0]
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * softmax_scale
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

    def one_row_one_document(*states: Tensor, **named: object) -> Tensor:
        raise AssertionError("a flash kernel was called without document boundaries")

    for name in _STATE:
        patch.setattr(flash, name, None)
    functions = (one_row_one_document, varlen, None, flash._pad_input, flash._unpad_input)
    patch.setattr(flash, "_lazy_imports", lambda *_, **__: functions)
    # It takes fp32, too, so no type to cast to is looked up.
    patch.setattr(flash_attention, "get_target_dtype", lambda *_: None)
    patch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    return seen
