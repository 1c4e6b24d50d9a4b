"""Multimodal models that are trained on images: their vision tower runs in every forward pass.

Ranks gather the weights of a module together (ZeRO-3, FSDP2), and reduce gradients together (ZeRO, DDP). If the
micro-batch of one rank had an image and that of another had none, one would wait for the other for ever, or for a
gradient that never comes. A micro-batch without an image therefore has one that no token stands for: its features,
multiplied by 0, are added to the embeddings of the tokens, which changes no bit of them, and gives the tower gradients
of 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


class _RunsTower:
    """The forward of a multimodal model with an argument for an image that no token stands for."""

    _unseen: dict[str, Any] | None = None

    def forward(self, *args: Any, unseen: dict[str, Any] | None = None, **named: Any) -> Any:
        """unseen: the arguments of `get_image_features` for such an image; None if the tokens stand for images."""
        self._unseen = unseen
        try:
            return super().forward(*args, **named)  # type: ignore[misc]
        finally:
            self._unseen = None

    def add_unseen(self, embedding: Any, tokens: Any, embedded: Tensor) -> Tensor | None:
        """Hook of the embedding: adds 0 times the features. Where a tower runs for images, it also runs after this."""
        if self._unseen is None:
            return None
        unseen, self._unseen = self._unseen, None
        features: Any = self.get_image_features(**unseen, return_dict=True)  # type: ignore[attr-defined]
        zero = sum(0 * feature.sum() for feature in _tensors(features))
        return embedded + zero.to(embedded.dtype) if isinstance(zero, Tensor) else None


_kinds: dict[type, type] = {}


def with_images(model: PreTrainedModel) -> PreTrainedModel:
    """Lets a multimodal model take the argument `unseen`, and returns it."""
    kind: Any = type(model)
    if kind not in _kinds:
        # `save_pretrained` writes the name of the class to `config.json`.
        _kinds[kind] = type(kind.__name__, (_RunsTower, kind), {"__module__": kind.__module__})
    model.__class__ = _kinds[kind]
    model.get_input_embeddings().register_forward_hook(model.add_unseen)
    return model


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors with a gradient in the output of a tower."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
