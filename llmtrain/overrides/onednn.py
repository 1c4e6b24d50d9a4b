"""Matrix products in fp32 on a CPU by oneDNN instead of MKL.

MKL uses AVX-512 on Intel's processors only (pytorch/builder#504). oneDNN, which torch includes, uses it everywhere.
AMD's Zen 5 computes 512 bits at once, and oneDNN is twice as fast there; Zen 4 computes them in two halves, and oneDNN
is up to 1.15 times as fast. Torch has no setting for that in fp32, so the kernels of `aten::mm` and `aten::addmm` are
replaced, on which linear layers, their gradients and compiled layers depend.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, library

from llmtrain.errors import Problem, RecipeError
from llmtrain.system.host import processor_field

SMALLEST = 2**23
"""Floating point operations below which MKL is as fast: calling oneDNN from Python takes some 10 µs more."""
NARROWEST = 128
"""Columns of a result from which on copying the left matrix, which oneDNN needs row by row, is worth its time where
oneDNN is twice as fast."""
ZEN_5 = 26
"""Family of the first of AMD's processors that compute 512 bits at once."""

_replaced: library.Library | None = None


def multiply_by_onednn(wanted: bool) -> None:
    """Replaces the kernels of matrix products in this process, or restores torch's own.

    Raises RecipeError if this build of torch does not include oneDNN.
    """
    global _replaced
    if wanted and not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        message = "'onednn' is not included in this build of torch"
        raise RecipeError(Problem("kernels.matmul", "kernels.matmul", message, "--set kernels.matmul=torch"))
    if wanted and _replaced is None:
        for name in _KERNELS:
            _original(name)
        _replaced = library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name, kernel in _KERNELS.items():
                _replaced.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
    elif not wanted and _replaced is not None:
        _replaced._destroy()  # type: ignore[no-untyped-call]
        _replaced = None


@cache
def _original(name: str) -> Any:
    return library.get_kernel(f"aten::{name}", "CPU")


def _is_faster(left: Tensor, right: Tensor) -> bool:
    if left.dtype is not torch.float32 or right.dtype is not torch.float32:
        return False
    (rows, inner), columns = left.shape, right.shape[-1]
    if right.shape[0] != inner or 2 * rows * inner * columns < SMALLEST:
        return False
    # With a right matrix that has gaps, oneDNN runs its reference implementation, which takes 600 times as long.
    if not (right.is_contiguous() or right.t().is_contiguous()):
        return False
    return left.is_contiguous() or (columns >= NARROWEST and _is_twice_as_fast())


@cache
def _is_twice_as_fast() -> bool:
    """Whether MKL's vectors, of 256 bits, are half of what this processor computes at once."""
    family = processor_field("cpu family")
    return processor_field("vendor_id") == "AuthenticAMD" and family.isdecimal() and int(family) >= ZEN_5


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """bias: of the result's columns. oneDNN reads it element by element, whatever its stride."""
    bias = None if bias is None else bias.contiguous()
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(left, right.t(), bias, "none", [], "")
    return product


def _mm(keys: Any, left: Tensor, right: Tensor) -> Tensor:
    if _is_faster(left, right):
        return _product(left, right)
    return _original("mm").call_boxed(keys, left, right)  # type: ignore[no-any-return]


def _mm_out(keys: Any, left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    if _is_faster(left, right) and _fits(out, left, right):
        return out.copy_(_product(left, right))
    return _original("mm.out").call_boxed(keys, left, right, out=out)  # type: ignore[no-any-return]


def _addmm(keys: Any, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta == alpha == 1 and _is_faster(left, right) and _is_of_columns(bias, right):
        return _product(left, right, bias)
    return _original("addmm").call_boxed(keys, bias, left, right, beta=beta, alpha=alpha)  # type: ignore[no-any-return]


def _addmm_out(
    keys: Any, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    is_plain = beta == alpha == 1 and _is_of_columns(bias, right) and _fits(out, left, right)
    if is_plain and _is_faster(left, right):
        return out.copy_(_product(left, right, bias))
    kernel = _original("addmm.out")
    return kernel.call_boxed(keys, bias, left, right, beta=beta, alpha=alpha, out=out)  # type: ignore[no-any-return]


def _is_of_columns(bias: Tensor, right: Tensor) -> bool:
    return bias.dtype is torch.float32 and bias.shape == right.shape[1:]


def _fits(out: Tensor, left: Tensor, right: Tensor) -> bool:
    return out.dtype is torch.float32 and out.shape == (left.shape[0], right.shape[1])


_KERNELS = {"mm": _mm, "mm.out": _mm_out, "addmm": _addmm, "addmm.out": _addmm_out}
