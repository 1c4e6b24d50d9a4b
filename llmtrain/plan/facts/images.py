"""Multimodal models that are trained as a whole, on conversations with images (`model.images`).

The table has what `transformers` does not say in a form that all families share. All else comes from the configuration,
from the model, and from its image processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.errors import Problem, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FIELD = "model.images"


@dataclass(frozen=True)
class ImageFamily:
    """How a multimodal family reads images."""

    tower: tuple[str, ...]
    """The beginnings of the names of the parameters that compute the features of images."""
    processor: str
    """Class in `transformers` that makes the tower's input from images, on PIL and NumPy if there is such a class."""
    inputs: tuple[str, ...]
    """What it makes, by the names of arguments of the model's forward pass."""
    around: tuple[str, ...] = ()
    """Fields of the configuration with the tokens before and after those of an image that the template does not write.
    """
    within: tuple[str, ...] = ()
    """Texts of the special tokens between the tiles of an image. The template writes the first of them for an image,
    and writes the image token itself if there are none."""
    language: tuple[str, ...] = ("model.language_model.*", "lm_head.*")
    """Patterns of the names of the text model's parameters."""
    unread: tuple[str, ...] = ()
    """The beginnings of the names of parameters of parts for other inputs, which are frozen."""
    grid_positions: bool = False
    """Whether the tokens of an image have three positions each, from its grid (M-RoPE, arXiv 2409.12191)."""
    token_types: bool = False
    """Whether the forward pass is told which tokens stand for images, between which attention goes both ways."""


_QWEN = ImageFamily(
    tower=("model.visual.",),
    processor="Qwen2VLImageProcessorPil",
    inputs=("pixel_values", "image_grid_thw"),
    grid_positions=True,
)
_GEMMA = ImageFamily(
    tower=("model.vision_tower.", "model.embed_vision."),
    processor="Gemma4ImageProcessorPil",
    inputs=("pixel_values", "image_position_ids"),
    around=("boi_token_id", "eoi_token_id"),
    unread=("model.audio_tower.", "model.embed_audio."),
    token_types=True,
)
_LLAMA = ImageFamily(
    tower=("vision_model.", "multi_modal_projector."),
    processor="Llama4ImageProcessor",
    inputs=("pixel_values",),
    around=("boi_token_id", "eoi_token_id"),
    within=("<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    language=("language_model.*",),
)
IMAGE_FAMILIES = {
    "gemma4": _GEMMA,
    "llama4": _LLAMA,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
}
"""Multimodal model type → how it reads images."""


def image_family(model_type: str, pretrained: str | None) -> ImageFamily:
    """Returns how a family reads images. Raises RecipeError if it is not one that is trained on them."""
    if model_type not in IMAGE_FAMILIES:
        message = f"'{model_type}' of {pretrained} is not trained on images, only {', '.join(IMAGE_FAMILIES)} are"
        raise RecipeError(Problem("model.images", FIELD, message, f"--set {FIELD}=false trains a text model on texts"))
    return IMAGE_FAMILIES[model_type]


def reads_images(config: Any) -> bool:
    """Whether a configuration is that of a multimodal model that is trained as a whole (`whole_with_images`)."""
    return getattr(type(config), "trains_images", False)


_kinds: dict[type, type] = {}


def whole_with_images(whole: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the configuration of a multimodal model that is trained as a whole.

    Its class has another identity than that of `transformers`, from which a causal LM, or the text model alone, may be
    built. `AutoModelForCausalLM` builds the whole of it from now on.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    kind = type(whole)
    if reads_images(whole):
        return whole
    if kind not in _kinds:
        named = {"trains_images": True, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _kinds[kind] = type(kind.__name__, (kind,), named)
        MODEL_FOR_CAUSAL_LM_MAPPING.register(_kinds[kind], MODEL_FOR_MULTIMODAL_LM_MAPPING[kind], exist_ok=True)
    whole.__class__ = _kinds[kind]
    return whole
