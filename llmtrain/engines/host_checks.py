"""What DeepSpeed asks the device for in each step, taken away where the guard answers it there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage3, stage_1_and_2
from torch import Tensor

from llmtrain.recipe import Precision


@contextmanager
def no_host_checks(precision: Precision) -> Iterator[None]:
    """Has DeepSpeed not wait for the gradient norm to learn whether it is finite, and whether it is to be clipped.

    It would drop a step with a norm that is not finite by itself, and not move the schedule on. With fp16 it has to
    look: that is how it finds its loss scale.
    """
    if precision == "fp16":
        yield
        return
    replaced: list[tuple[Any, str, Any]] = [
        (bf16_optimizer, "is_invalid_grad_norm", _not_asked),
        (stage_1_and_2, "is_invalid_grad_norm", _not_asked),
        (stage3, "is_invalid_grad_norm", _not_asked),
        (bf16_optimizer, "clip_tensors_by_global_norm", _clip),
    ]
    own = [getattr(module, name) for module, name, _ in replaced]
    for module, name, replacement in replaced:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for (module, name, _), function in zip(replaced, own, strict=True):
            setattr(module, name, function)


def _not_asked(norm: object) -> bool:
    """The guard's verdict is on the device already."""
    return False


def _clip(input_tensors: Iterable[Tensor], max_norm: float, global_norm: Tensor | float, mpu: object = None) -> None:
    """As DeepSpeed's own, which multiplies by 1 where it would not multiply."""
    factor = max_norm / (global_norm + 1e-6)
    factor = factor.clamp(max=1.0) if isinstance(factor, Tensor) else min(factor, 1.0)
    torch._foreach_mul_([tensor.detach() for tensor in input_tensors], factor)
