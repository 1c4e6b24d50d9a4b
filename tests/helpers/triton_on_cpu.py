"""Triton's interpreter: kernels on CPU tensors, one program at a time. `conftest.py` enables it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

needs_liger = pytest.mark.skipif(
    any(find_spec(package) is None for package in ("liger_kernel", "triton")),
    reason="needs liger-kernel and triton: pip install -e '.[liger]'",
)


@cache
def complete() -> None:
    """Adds what triton 3.7.1's interpreter lacks, and compiled kernels have: floats as tensors, CUDA's functions.

    To be called before Liger is imported, which takes these functions by their names.
    """
    import numpy as np
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    assert triton.knobs.runtime.interpret
    plain = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if type(argument) is not float:
            return plain(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)

    def elementwise(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            data = function(value.handle.data).astype(value.handle.data.dtype)
            return tl.tensor(interpreter.TensorHandle(data, value.handle.dtype), value.type)

        return run

    interpreter._implicit_cvt = converted
    libdevice.rsqrt = elementwise(lambda data: 1 / np.sqrt(data))
    libdevice.tanh = elementwise(np.tanh)
