"""Tiny multimodal models, as `transformers` saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM

from llmtrain.models.tiny.configuration import shrink_configuration
from llmtrain.plan.facts.wrapper import text_configuration

_ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_IMAGE = {**_ENCODER, "image_size": 32, "patch_size": 8}
_QWEN = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8}
_QWEN3 = {**_QWEN, "num_position_embeddings": 64}
_DEEP = {**_QWEN3, "deepstack_visual_indexes": [0]}
_WIDTHS = ("projector_input_dim", "projector_output_dim", "vision_output_dim")
VISION: dict[str, dict[str, Any]] = {
    "gemma3": _IMAGE,
    "gemma4": {
        **{**_ENCODER, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16},
        **{"patch_size": 8, "position_embedding_size": 64},
    },
    "llama4": {**_IMAGE, "intermediate_size": 128, **dict.fromkeys(_WIDTHS, 32)},
    "mistral3": {**_IMAGE, "head_dim": 16},
    "qwen2_5_vl": {**_QWEN, "fullatt_block_indexes": [1]},
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_vl": _DEEP,
    "qwen3_vl_moe": _DEEP,
}
"""Type → its vision tower. All names of fields differ."""
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
VOCABULARY = 300
_TEXT: dict[str, dict[str, Any]] = {
    "gemma4": {"vocab_size_per_layer_input": VOCABULARY},
    "llama4": {"attention_chunk_size": 64},  # chunks begin at other tokens of a document if it is packed
    "qwen2_5_vl": {"rope_parameters": _ROTARY},
}
PROCESSOR = "preprocessor_config.json"


def save_wrapper(
    folder: Path,
    family: str,
    vocabulary: int = VOCABULARY,
    layers: int = 4,
    text: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> Path:
    """Saves a multimodal model with random weights and a processor; returns the folder.

    text, fields: of the text model's configuration, and of the whole.
    """
    kind: Any = CONFIG_MAPPING[family]
    own = {name: vocabulary if value == VOCABULARY else value for name, value in _TEXT.get(family, {}).items()}
    tiny = shrink_configuration(text_configuration(kind()), layers, **{**own, **text}, vocab_size=vocabulary)
    tied = tiny.tie_word_embeddings
    config = kind(vision_config=VISION[family], text_config=tiny.to_dict(), tie_word_embeddings=tied, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():  # so that no norm is 1 and no bias is 0
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    (folder / PROCESSOR).write_text(json.dumps({"image_mean": [0.5, 0.5, 0.5]}), encoding="utf-8")
    return folder
