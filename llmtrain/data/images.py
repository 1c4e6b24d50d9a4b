"""Images of conversations: read and decoded, the tokens that stand for them, and the input of the vision tower.

A store has the encoded images, as they were given. The tower's input takes some hundred times as many bytes, so it is
made when a micro-batch is read, from pixels alone, and thus the same each time.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.cache import key_of
from llmtrain.data.chat.conversation import RowError
from llmtrain.errors import DataError, Problem, format_value, reason
from llmtrain.plan.facts.images import FIELD, ImageFamily, image_family
from llmtrain.plan.facts.wrapper import whole_configuration
from llmtrain.recipe import ModelConfig
from llmtrain.system.hub import stored_file
from llmtrain.system.untrusted import UNREADABLE, expanded, file_fault, read_bytes, read_json

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from llmtrain.data.tokenizer import Encoder

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of images that are read; of an animation, the first picture."""
MAX_BYTES = 32 << 20
"""Size of the largest encoded image."""
MAX_PIXELS = 1 << 26
"""Pixels of the largest image: a small file may hold so many that they fill the memory."""
INSTALL = "pip install 'llmtrain[images]'"
UNSEEN_PIXELS = 8
"""Height and width of the image of micro-batches without one; processors enlarge it to the smallest that they make."""


def read_image(value: Any, folder: Path | None) -> bytes:
    """Returns an encoded image of a row.

    value: bytes, a path, a data URL, or an object with one of them. folder: that of the data file, to which paths are
    relative. Raises RowError.
    """
    if isinstance(value, Mapping):
        given = [value[key] for key in ("bytes", "base64", "image", "url", "path") if value.get(key) is not None]
        if not given:
            raise RowError(f"an image is {format_value(value)}, without bytes, base64, image, url or path")
        if isinstance(text := value.get("base64"), str) and given[0] is text and not text.startswith("data:"):
            return _base64(text)
        return read_image(given[0], folder)
    if isinstance(value, bytes):
        content = value
    elif not isinstance(value, str) or not value:
        raise RowError(f"an image is {format_value(value)}, not bytes, a path or a data URL")
    elif value.startswith("data:"):
        head, comma, text = value.partition(",")
        if not comma or not head.endswith(";base64"):
            raise RowError(f"an image is a data URL without base64: {format_value(value)}")
        content = _base64(text)
    elif "://" in value and not value.startswith("file://"):
        raise RowError(f"the image {format_value(value)} is on the network; download it, and give its path")
    else:
        path = expanded(value.removeprefix("file://"))
        if folder is None and not path.is_absolute():
            raise RowError(f"the image {format_value(value)} is a relative path, but its row is not of a local file")
        try:
            return read_bytes((folder or Path()) / path, MAX_BYTES)
        except UNREADABLE as error:
            raise RowError(f"the image {format_value(value)} cannot be read: {file_fault(error)}") from None
    if len(content) > MAX_BYTES:
        raise RowError(f"an image has {len(content):,} bytes, of at most {MAX_BYTES:,}")
    return content


def _base64(text: str) -> bytes:
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise RowError(f"an image has {len(text):,} characters of base64: more than {MAX_BYTES:,} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"an image is not base64: {error}") from None


def decode_image(content: bytes) -> Image:
    """Returns an image in RGB, turned as its metadata say. Raises RowError if it is too large, or cannot be decoded."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height <= MAX_PIXELS:
                return ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:  # the decoders of PIL raise anything
        known = f"; formats are {', '.join(FORMATS)}"
        raise RowError(f"an image of {len(content):,} bytes cannot be decoded: {reason(error)}{known}") from None
    raise RowError(f"an image has {width:,} × {height:,} pixels, more than {MAX_PIXELS:,}")


@dataclass(frozen=True)
class Images:
    """The images of a micro-batch."""

    inputs: dict[str, torch.Tensor]
    """Arguments of the model's forward pass for its tower: `pixel_values` and the like, in the order of the tokens."""
    positions: torch.Tensor | None = None
    """[3, micro_batch_size, T], int64: the temporal and spatial positions of each token, if the family has them."""
    are_seen: bool = True
    """Whether tokens stand for them. Otherwise there is one image, which only lets the tower run."""

    def to(self, device: torch.device) -> Images:
        """Returns a copy on a device."""
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        positions = None if self.positions is None else self.positions.to(device, non_blocking=True)
        return Images(inputs, positions, self.are_seen)

    def arguments(self, position_ids: torch.Tensor) -> dict[str, Any]:
        """Returns arguments for a model's forward pass. position_ids: [micro_batch_size, T], on its device."""
        import torch

        here = self.to(position_ids.device)
        found: dict[str, Any] = {**here.inputs, "unseen": not self.are_seen}
        if here.positions is not None:
            found["position_ids"] = torch.cat([position_ids[None], here.positions])
        return found


@dataclass(frozen=True)
class ImageProcessor:
    """Makes the input of a model's vision tower."""

    family: ImageFamily
    settings: str
    """Its configuration in the model's files, as JSON."""
    token: int
    """The image token: each stands for a part of an image, and gets its features."""
    around: tuple[int, ...] = ()
    """The tokens before and after those of an image that the template does not write."""
    within: tuple[int, ...] = ()
    """The tokens between the tiles of an image (`ImageFamily.within`)."""
    tile: int = 0
    """The number of image tokens of a tile, of a family that divides images into tiles."""

    @property
    def key(self) -> list[Any]:
        """Identifies what is made of images, for the key of a store."""
        tiles = [*self.within, self.tile] if self.within else []
        return ["images", self.family.processor, key_of(self.settings), self.token, *self.around, *tiles]

    @property
    def written(self) -> int:
        """The token that the chat template writes once for an image."""
        return self.within[0] if self.within else self.token

    @cached_property
    def _made(self) -> Any:
        import transformers

        return getattr(transformers, self.family.processor).from_dict(json.loads(self.settings))

    def tokens(self, image: Image) -> list[int]:
        """Returns the tokens that stand for an image. Raises RowError for a shape that cannot be processed."""
        try:
            inside = _TOKENS[self.family.processor](self, self._made, image.height, image.width)
        except ValueError as error:
            raise RowError(f"an image of {image.width} × {image.height} pixels is refused: {error}") from None
        return [*self.around[:1], *inside, *self.around[1:]]

    def images(
        self, rows: Sequence[Sequence[tuple[int, bytes]]], input_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> Images:
        """Returns the images of a micro-batch, or one that no token stands for.

        rows: for each row, the column of the first image token of each image, in order, and the encoded image.
        input_ids, position_ids: [rows, T], on the host.
        """
        import torch
        from PIL import Image

        decoded = [decode_image(content) for row in rows for _, content in row]
        unseen = [] if decoded else [Image.new("RGB", (UNSEEN_PIXELS, UNSEEN_PIXELS))]
        made = self._made.preprocess(decoded or unseen, return_tensors="pt")
        inputs = {name: made[name].contiguous() for name in self.family.inputs}
        if self.family.token_types:
            inputs["mm_token_type_ids"] = (input_ids == self.token).long()
        positions = None
        if self.family.grid_positions:
            grids = made["image_grid_thw"].numpy()[:, 1:] // self._made.merge_size
            columns = [[column for column, _ in row] for row in rows]
            positions = torch.from_numpy(grid_positions(position_ids.numpy(), columns, grids))
        return Images(inputs, positions, bool(decoded))


def _tokens_of_qwen(images: ImageProcessor, processor: Any, height: int, width: int) -> list[int]:
    merged: int = processor.merge_size**2
    return [images.token] * (int(processor.get_number_of_image_patches(height, width, {})) // merged)


def _tokens_of_gemma(images: ImageProcessor, processor: Any, height: int, width: int) -> list[int]:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    patch: int = processor.patch_size
    pooled: int = processor.pooling_kernel_size
    sizes = get_aspect_ratio_preserving_size(height, width, patch, processor.max_soft_tokens * pooled**2, pooled)
    return [images.token] * math.prod(int(size) // (patch * pooled) for size in sizes)


def _tokens_of_llama(images: ImageProcessor, processor: Any, height: int, width: int) -> list[int]:
    """As `Llama4Processor._prompt_split_image`: row by row the tiles of a large image, then the whole in one tile."""
    import torch
    from transformers.models.llama4 import image_processing_llama4 as module

    size = processor.size
    known = module.find_supported_resolutions(max_num_chunks=processor.max_patches, patch_size=size)
    fit = module.get_best_fit((height, width), torch.tensor(known), resize_to_max_canvas=processor.resize_to_max_canvas)
    rows, columns = int(fit[0]) // size["height"], int(fit[1]) // size["width"]
    whole, beside, below = images.within
    tile = [images.token] * images.tile
    row = [*tile, *[beside, *tile] * (columns - 1), below]
    return [*(row * rows if rows * columns > 1 else []), whole, *tile]


_TOKENS: dict[str, Callable[[ImageProcessor, Any, int, int], list[int]]] = {
    "Qwen2VLImageProcessorPil": _tokens_of_qwen,
    "Gemma4ImageProcessorPil": _tokens_of_gemma,
    "Llama4ImageProcessor": _tokens_of_llama,
}
"""Class of an image processor → the tokens that stand for an image of some height and width, without those around."""


def grid_positions(
    position_ids: NDArray[np.int64], columns: Sequence[Sequence[int]], grids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the temporal and spatial positions of each token, [3, rows, T], as Qwen2-VL counts them.

    The tokens of an image have its rows and columns as positions, counted from that of its beginning. The text after it
    goes on after the largest of them. position_ids: [rows, T]; they begin with 0 in each document. columns: those of
    the first token of each image, by row. grids: [images, 2], their height and width in tokens.
    """
    positions = np.repeat(position_ids[None], 3, axis=0)
    sizes = iter(grids.tolist())
    for row, starts in enumerate(columns):
        begins = [*np.flatnonzero(position_ids[row] == 0).tolist(), position_ids.shape[1]]
        for start in starts:
            height, width = next(sizes)
            end, end_of_document = start + height * width, next(begin for begin in begins if begin > start)
            first = positions[0, row, start]
            positions[:, row, start:end] = first
            positions[1, row, start:end] += np.repeat(np.arange(height), width)
            positions[2, row, start:end] += np.tile(np.arange(width), height)
            positions[:, row, end:end_of_document] += max(height, width) - height * width
    return positions


def image_processor(model: ModelConfig, model_type: str, declared: dict[str, Any], encoder: Encoder) -> ImageProcessor:
    """Returns what makes the input of the tower of a recipe's model.

    declared: the content of its `config.json`. encoder: of the recipe's tokenizer. Raises DataError if a package is
    missing, if the model's files lack the configuration of its image processor, or if the tokenizer lacks a token.
    """
    family = image_family(model_type, model.pretrained)
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise DataError(Problem("data.images", FIELD, "needs Pillow, which is not installed", INSTALL)) from None
    if not family.processor.endswith("Pil"):
        _require_torchvision(model_type)
    settings = None
    try:
        if (file := stored_file(str(model.pretrained), "processor_config.json", model.revision)) is not None:
            settings = read_json(file, dict[str, Any]).get("image_processor")
        file = stored_file(str(model.pretrained), "preprocessor_config.json", model.revision)
        if settings is None and file is not None:
            settings = read_json(file, dict[str, Any])
    except UNREADABLE as error:
        raise DataError(
            Problem("data.images", "model.pretrained", f"{file} cannot be read: {file_fault(error)}")
        ) from None
    if settings is None:
        message = f"{model.pretrained} has neither preprocessor_config.json nor an image processor in another file"
        raise DataError(Problem("data.images", "model.pretrained", message, "copy it from the original model"))
    config: Any = whole_configuration(model_type, declared)
    special = encoder.special_tokens()
    missing = [text for text in family.within if text not in special]
    if missing or config.image_token_id not in special.values():
        lacking = ", ".join(missing) or f"number {config.image_token_id}"
        message = f"lacks the special token {lacking}, which stands for images in {model.pretrained}"
        raise DataError(Problem("data.images", "data.tokenizer", message, f"--set data.tokenizer={model.pretrained}"))
    tower = config.vision_config
    tile = int((tower.image_size // tower.patch_size * tower.pixel_shuffle_ratio) ** 2) if family.within else 0
    return ImageProcessor(
        family,
        json.dumps(settings, sort_keys=True),
        config.image_token_id,
        tuple(getattr(config, name) for name in family.around),
        tuple(map(special.__getitem__, family.within)),
        tile,
    )


def _require_torchvision(model_type: str) -> None:
    """Raises DataError if torchvision, with which `transformers` resizes the images of a family, cannot be imported."""
    try:
        import torchvision.transforms.v2.functional  # noqa: F401
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
        message = f"images of '{model_type}' need torchvision, which cannot be imported: {reason(error)}"
        fix = "pip install torchvision, of the release that belongs to the installed torch"
        raise DataError(Problem("data.images", FIELD, message, fix)) from None
