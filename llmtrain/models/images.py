"""Multimodal models that are trained on images: their vision tower runs in every forward pass.

Ranks gather the weights of a module together (ZeRO-3, FSDP2), and reduce gradients together (ZeRO, DDP). If the
micro-batch of one rank had an image and that of another had none, one would wait for the other for ever, or for a
gradient that never comes. A micro-batch without an image therefore has one that no token stands for. Its features go
the way of others, but without any row. So no result depends on them, the gradients of the tower are 0, and modules run
in the same order in both passes, which ZeRO-3 compares.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


class _RunsTower:
    """The forward of a multimodal model with an argument for an image that no token stands for."""

    base_model: Any

    def forward(self, *args: Any, unseen: bool = False, **named: Any) -> Any:
        """unseen: whether no token stands for the image."""
        self.base_model.drops_features = unseen
        try:
            return super().forward(*args, **named)  # type: ignore[misc]
        finally:
            self.base_model.drops_features = False


class _HasFeatures:
    """A multimodal model without its head, of which no token may stand for the images."""

    drops_features = False

    def get_image_features(self, *args: Any, **named: Any) -> Any:
        """Returns what the family returns, or no row of it."""
        features = super().get_image_features(*args, **named)  # type: ignore[misc]
        return _without_rows(features) if self.drops_features else features


_kinds: dict[tuple[type, type], type] = {}


def with_images(model: PreTrainedModel) -> PreTrainedModel:
    """Lets a multimodal model take the argument `unseen`, and returns it."""
    model.base_model.__class__ = _extended(type(model.base_model), _HasFeatures)
    model.__class__ = _extended(type(model), _RunsTower)
    return model


def _extended(own: type, kind: type) -> type:
    """Returns a class of a family with the methods of `kind`; `save_pretrained` writes its name to `config.json`."""
    if (own, kind) not in _kinds:
        _kinds[own, kind] = type(own.__name__, (kind, own), {"__module__": own.__module__})
    return _kinds[own, kind]


def _without_rows(value: Any) -> Any:
    """Returns the output of a tower with an empty first dimension of each tensor."""
    if isinstance(value, Tensor):
        return value[:0]
    if isinstance(value, dict):  # an output of `transformers`
        for name in list(value):
            value[name] = _without_rows(value[name])
        return value
    return type(value)(map(_without_rows, value)) if isinstance(value, tuple | list) else value
