"""Triton's interpreter: kernels on CPU tensors, a program at a time. For processes that have not imported triton."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

PACKAGES = ("liger_kernel", "triton")
MISSING = [package for package in PACKAGES if find_spec(package) is None]
REASON = f"needs {' and '.join(PACKAGES)}: pip install -e '.[liger]'"


def interpret() -> None:
    """From here on triton's kernels are interpreted in this process.

    What triton 3.7.1's interpreter lacks, and compiled kernels have: numbers as tensors, and two functions of CUDA's.
    """
    assert "triton" not in sys.modules, "kernels are compiled or interpreted from their definition on"
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    plain = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if type(argument) is not float:
            return plain(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)

    def elementwise(function: Callable[[Any], Any]) -> Callable[[tl.tensor], tl.tensor]:
        def run(value: tl.tensor) -> tl.tensor:
            data = function(value.handle.data).astype(value.handle.data.dtype)
            return tl.tensor(interpreter.TensorHandle(data, value.handle.dtype), value.type)

        return run

    interpreter._implicit_cvt = converted
    libdevice.rsqrt = elementwise(lambda data: 1 / np.sqrt(data))
    libdevice.tanh = elementwise(np.tanh)
