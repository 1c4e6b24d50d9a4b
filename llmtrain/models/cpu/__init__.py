"""Kernels for CPUs in C++ (`kernels.cpp`), in fp32: attention within documents, and cross-entropy.

They are compiled when a run starts (`llmtrain.models.compiled.compile_for_cpu`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain.data import NO_TARGET

SOURCE = Path(__file__).with_name("kernels.cpp")

_library: ctypes.CDLL | None = None
"""The kernels, once they are compiled."""


class _Sizes(ctypes.Structure):
    """The numbers that attention takes, declared as in `kernels.cpp`. A window of 0 has no limit."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "documents", "heads", "key_heads")),
        *((name, ctypes.c_int64) for name in ("width", "value_width", "window")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class _Labels(ctypes.Structure):
    """The numbers that cross-entropy takes, declared as in `kernels.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "vocabulary", "no_target")),
        ("threads", ctypes.c_int32),
    )


_FUNCTIONS = {
    "attention_forward": (_Sizes, 6),
    "attention_backward": (_Sizes, 10),
    "cross_entropy_forward": (_Labels, 4),
    "cross_entropy_backward": (_Labels, 4),
}
"""Name → the numbers that it takes, and how many tensors."""


def set_library(library: ctypes.CDLL) -> None:
    """Sets the compiled `kernels.cpp` that this process calls."""
    global _library
    for name, (numbers, tensors) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.POINTER(numbers), *[ctypes.c_void_p] * tensors]
        function.restype = ctypes.c_bool
    _library = library


def is_compiled() -> bool:
    """Whether the kernels can be called."""
    return _library is not None


def has_kernel_for(states: Tensor) -> bool:
    """Whether there is a kernel for tensors of this device and dtype."""
    return is_compiled() and states.device.type == "cpu" and states.dtype == torch.float32


def attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Returns causal attention within documents, [tokens, heads, value width], and the log-sum-exp, [heads, tokens].

    query, key, value: [tokens, heads, width], where key and value may have fewer heads; bounds: [documents + 1], where
    documents begin and end. Raises ValueError if the boundaries or the numbers of heads do not fit the tensors.
    """
    tokens, heads, _ = query.shape
    output, log_sums = query.new_empty(tokens, heads, value.shape[-1]), query.new_empty(heads, tokens)
    _call_attention("attention_forward", bounds, scale, window, query, key, value, output, log_sums)
    return output, log_sums


def attention_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    output: Tensor,
    log_sums: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value, given that of the output; the others as for `attention`."""
    query_gradient, key_gradient, value_gradient = (state.new_empty(state.shape) for state in (query, key, value))
    saved = (query, key, value, output, log_sums, gradient)
    _call_attention("attention_backward", bounds, scale, window, *saved, query_gradient, key_gradient, value_gradient)
    return query_gradient, key_gradient, value_gradient


def _call_attention(name: str, bounds: Tensor, scale: float, window: int | None, *tensors: Tensor) -> None:
    contiguous = [tensor.contiguous() for tensor in (bounds.to(torch.int32), *tensors)]
    _, query, key, value, *_ = contiguous
    tokens, heads, width = query.shape
    sizes = _Sizes(
        tokens=tokens,
        documents=len(bounds) - 1,
        heads=heads,
        key_heads=key.shape[1],
        width=width,
        value_width=value.shape[-1],
        window=window or 0,
        scale=scale,
        threads=torch.get_num_threads(),
    )
    if not _function(name)(sizes, *(tensor.data_ptr() for tensor in contiguous)):
        raise ValueError("the document boundaries or its heads do not fit its tokens")


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of each token, [tokens], in nats; 0 without a target.

    logits: [tokens, vocabulary] in fp32, which the backward pass overwrites with their gradient; labels: [tokens], with
    NO_TARGET at tokens without a target. Raises ValueError if a label is no token of the vocabulary.
    """
    losses: Tensor = _CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits and the logarithms of their sums."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the losses."""
        logits, labels = logits.contiguous(), labels.long().contiguous()
        losses, log_sums = logits.new_empty(len(logits)), logits.new_empty(len(logits))
        if not _call_cross_entropy("cross_entropy_forward", labels, logits, losses, log_sums):
            raise ValueError(f"a label is not below the size of the vocabulary, {logits.shape[1]}")
        ctx.save_for_backward(labels, logits, log_sums)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient of the logits, in their memory."""
        labels, logits, log_sums = ctx.saved_tensors
        # If an operation of the model has kept its logits, too, its backward pass raises an error now.
        torch.autograd.graph.increment_version(logits)
        _call_cross_entropy("cross_entropy_backward", labels, logits, gradient.contiguous(), log_sums)
        return logits, None


def _call_cross_entropy(name: str, labels: Tensor, logits: Tensor, *others: Tensor) -> bool:
    tokens, vocabulary = logits.shape
    sizes = _Labels(tokens=tokens, vocabulary=vocabulary, no_target=NO_TARGET, threads=torch.get_num_threads())
    return _function(name)(sizes, *(tensor.data_ptr() for tensor in (labels, logits, *others)))


def _function(name: str) -> Callable[..., bool]:
    function: Callable[..., bool] = getattr(_library, name)
    return function
