"""Small multimodal models with their tokenizers and image processors, and conversations with images drawn here."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from llmtrain.recipe import Recipe, parse_recipe
from tests.helpers.chat_tokenizers import write_chat_tokenizer
from tests.helpers.wrappers import PROCESSOR, save_wrapper

VOCABULARY = 400
_QWEN_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_PROCESSOR = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2},
    **{"size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}},
    **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
}
_QWEN_NAMES = {
    **{"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    **{"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
}
_GEMMA_TOKENS = ("<|im_start|>", "<|im_end|>", "<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<pad>")
_GEMMA_NAMES = {
    **{"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
    **{"video_token_id": "<|video|>", "audio_token_id": "<|audio|>"},
}
_GEMMA_AUDIO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32}
"""A part that images do not reach."""
_GEMMA_PROCESSOR = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 8, "max_soft_tokens": 70}


_LLAMA_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
)
_LLAMA_NAMES = {
    "image_token_index": "<|patch|>",
    "boi_token_index": "<|image_start|>",
    "eoi_token_index": "<|image_end|>",
}
_LLAMA_PROCESSOR = {
    **{"image_processor_type": "Llama4ImageProcessor", "size": {"height": 32, "width": 32}, "max_patches": 4},
    **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
}


def save_image_model(folder: Path, family: str, layers: int = 2) -> Path:
    """Saves a tiny model that reads images, with its tokenizer and image processor; returns the folder."""
    is_gemma = family == "gemma4"
    tokens, names, processor = {
        "gemma4": (_GEMMA_TOKENS, _GEMMA_NAMES, _GEMMA_PROCESSOR),
        "llama4": (_LLAMA_TOKENS, _LLAMA_NAMES, _LLAMA_PROCESSOR),
    }.get(family, (_QWEN_TOKENS, _QWEN_NAMES, _QWEN_PROCESSOR))
    template = _QWEN_TEMPLATE.replace(_QWEN_IMAGE, "<|image|>") if "<|image|>" in tokens else _QWEN_TEMPLATE
    write_chat_tokenizer(folder, {"special": tokens, "eos": "<|im_end|>"}, template)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id
    # Attention between the tokens of an image goes both ways, in layers with windows.
    text: dict[str, Any] = {"use_bidirectional_attention": "vision", "pad_token_id": ids("<pad>")} if is_gemma else {}
    fields: dict[str, Any] = {name: ids(token) for name, token in names.items()}
    if is_gemma:
        fields["audio_config"] = _GEMMA_AUDIO
    if family == "llama4":
        text["attention_chunk_size"] = 1024  # sequences with several documents are at most as long
    save_wrapper(folder, family, VOCABULARY, layers, text, **fields)
    (folder / PROCESSOR).write_text(json.dumps(processor), encoding="utf-8")
    return folder


def picture(number: int, width: int, height: int) -> Image.Image:
    """Draws an image of noise."""
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    """Encodes an image."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def image_rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """Returns conversations with 0, 1 or 2 images, given as paths, data URLs, base64, or in a column."""
    rows = []
    for number in range(count):
        pictures = [picture(10 * number + i, 20 + 8 * (number % 4), 16 + 12 * i) for i in range(number % 3)]
        parts: list[Any] = [{"type": "text", "text": f"Question {number}? "}]
        row: dict[str, Any] = {}
        for index, image in enumerate(pictures):
            path = folder / f"{number}-{index}.png"
            path.write_bytes(png(image))
            given = (
                {"type": "image", "path": path.name},
                {"type": "image_url", "image_url": {"url": data_url(image)}},
                {"type": "image", "base64": base64.b64encode(png(image)).decode()},
                {"type": "image"},
            )[(number + index) % 4]
            if len(given) == 1:
                row.setdefault("images", []).append(str(path))
            parts += [given, {"type": "text", "text": f" and {index}"}]
        answer = {"role": "assistant", "content": "Yes. " * (1 + number % 4)}
        rows.append({"messages": [{"role": "user", "content": parts if pictures else parts[0]["text"]}, answer], **row})
    return rows


def image_recipe(model: Path, folder: Path, rows: list[Any], **fields: Any) -> Recipe:
    """Returns a recipe that trains a model on conversations, which are written to a folder."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return parse_recipe(
        {
            "name": "images",
            "model": {"pretrained": str(model), "images": True},
            "data": {
                **{"sources": [{"name": str(folder / "rows.jsonl")}], "tokenizer": str(model), "eval_fraction": 0.0},
                **{"sequence_length": 96, "cache_dir": str(folder / "cache"), "packing": "best_fit"},
            },
            "optim": {"lr": 1e-3, "weight_decay": 1.0, "warmup_steps": 2, "clip_grad_norm": 0.5},
            "batch": {"global_batch_size": 4, "micro_batch_size": 1},
            "train": {"max_steps": 10},
            "evaluation": {"every_steps": 0},
        }
    ).with_(**fields)
