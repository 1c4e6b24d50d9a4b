"""What llmtrain replaces in `transformers` 5.22 within contexts. `llmtrain.engines.overrides` has the list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor
from transformers import masking_utils

Change = Callable[[Tensor, Any, Any, Tensor | None], tuple[Tensor, Tensor | None]]
"""Maps embeddings, mask, cache and positions of a call to the embeddings and positions from which a mask is made."""

_changes: list[Change] = []


@contextmanager
def replaced(owner: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Sets `owner.name` to `value` within the context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def mask_arguments(change: Change) -> Iterator[None]:
    """Applies `change` to the arguments of every mask (full, sliding or chunked) within the context.

    All masks begin with `_preprocess_mask_arguments`. Contexts nest, and the innermost change is applied first.
    """
    original = masking_utils._preprocess_mask_arguments

    def preprocess(
        config: Any,
        embeddings: Tensor,
        mask: Any,
        cache: Any,
        positions: Tensor | None = None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        for one in reversed(_changes):
            embeddings, positions = one(embeddings, mask, cache, positions)
        return original(config, embeddings, mask, cache, positions, *rest, **named)

    _changes.append(change)
    try:
        if len(_changes) > 1:  # the outermost context has replaced the function
            yield
        else:
            with replaced(masking_utils, "_preprocess_mask_arguments", preprocess):
                yield
    finally:
        _changes.pop()
