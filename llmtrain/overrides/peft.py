"""The parts of PEFT 0.21 that llmtrain replaces. `llmtrain.overrides` has the list."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def adapters_without_weight() -> Iterator[None]:
    """Makes PEFT's modules have no `weight` within the context, so that AutoTP splits their parts.

    AutoTP takes whatever has a matrix of that name for a linear layer: it would replace a module by the layer that it
    stands for, and the adapter would be gone.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    weight = BaseTunerLayer.weight
    del BaseTunerLayer.weight
    try:
        yield
    finally:
        BaseTunerLayer.weight = weight
