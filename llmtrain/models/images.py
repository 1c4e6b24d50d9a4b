"""Multimodal models that are trained on images: their vision tower runs in every forward pass.

Ranks gather the weights of a module together (ZeRO-3, FSDP2), and reduce gradients together (ZeRO, DDP). If the
micro-batch of one rank had an image and that of another had none, one would wait for the other for ever, or for a
gradient that never comes. A micro-batch without an image therefore has one that no token stands for. Its features go
the way of others, but without any row. So no result depends on them, the gradients of the tower are 0, and modules run
in the same order in both passes, which ZeRO-3 compares.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


def with_images(model: PreTrainedModel) -> PreTrainedModel:
    """Lets the forward of a multimodal model take the argument `unseen`, whether no token stands for its image.

    Returns the model.
    """
    base: Any = model.base_model  # the model itself, if its head is that of a causal LM inside of it (Llama 4)
    base_kind: Any = type(base)
    base.__class__ = _drops_features(base_kind)
    kind: Any = type(model)
    model.__class__ = _runs_tower(kind)
    return runnable_llama4(model)


def runnable_llama4(model: PreTrainedModel) -> PreTrainedModel:
    """Lets a multimodal Llama 4 run, whose forward fails in `transformers` 5.24.0. Returns the model, of any family."""
    if model.config.model_type == "llama4":
        model.get_submodule("language_model").register_forward_hook(_with_image_outputs)
        model.get_submodule("vision_model.patch_embedding.linear").register_forward_pre_hook(_in_type_of_weights)
    return model


def _with_image_outputs(_: Any, inputs: Any, output: Any) -> None:
    """Adds a field that the forward of the whole reads of the output of its causal LM, which does not have it.

    See docs/upstream/llama4_image_outputs.md.
    """
    if not hasattr(output, "image_outputs"):
        output.image_outputs = None


def _in_type_of_weights(linear: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Converts the pixels, which Llama 4's image processor makes in bf16. Other families' towers do this themselves."""
    return tuple(pixels.to(linear.weight.dtype) for pixels in inputs)


@cache
def _runs_tower(kind: Any) -> Any:
    """Returns the class of a whole model with the argument. `save_pretrained` writes its name to `config.json`."""

    @wraps(kind.forward)  # others look for arguments in its signature
    def forward(self: Any, *args: Any, unseen: bool = False, **named: Any) -> Any:
        self.base_model.drops_features = unseen
        try:
            return kind.forward(self, *args, **named)
        finally:
            self.base_model.drops_features = False

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@cache
def _drops_features(kind: Any) -> Any:
    """Returns the class of a multimodal model without its head, whose images may have no features."""

    @wraps(kind.get_image_features)
    def get_image_features(self: Any, *args: Any, **named: Any) -> Any:
        features = kind.get_image_features(self, *args, **named)
        return _without_rows(features) if self.drops_features else features

    body = {"get_image_features": get_image_features, "drops_features": False, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), body)


def _without_rows(value: Any) -> Any:
    """Returns the output of a tower with an empty first dimension of each tensor."""
    if isinstance(value, Tensor):
        return value[:0]
    if isinstance(value, dict):  # an output of `transformers`
        for name in list(value):
            value[name] = _without_rows(value[name])
        return value
    return type(value)(map(_without_rows, value)) if isinstance(value, tuple | list) else value
