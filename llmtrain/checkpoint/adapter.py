"""Writes the adapter of a checkpoint as PEFT does, for `PeftModel.from_pretrained`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from llmtrain.engines.state.files import stream_tensors
from llmtrain.engines.state.save_load import StateSource
from llmtrain.models import adapter
from llmtrain.models.hub_names import empty_model
from llmtrain.recipe import Recipe
from llmtrain.system.durable import create


def write_adapter(
    recipe: Recipe, config: PreTrainedConfig, source: StateSource, dtype: torch.dtype, base: str, folder: Path
) -> None:
    """Writes the configuration and the weights of an adapter. base: the folder or hub name of the frozen weights."""
    model = empty_model(config, dtype, recipe.model.trust_remote_code)
    settings = adapter.outline(model, recipe)
    settings.base_model_name_or_path, settings.revision = base, recipe.model.revision
    settings.save_pretrained(folder)
    trained = {adapter.weight_name(name): one for name, one in model.named_parameters() if one.requires_grad}
    files = {adapter.file_name(name): name for name in trained}

    def read(key: str) -> Tensor:
        like = trained[files[key]]
        return source.read_as(files[key], like).view(like.shape).to(dtype)

    with create(folder / adapter.ADAPTER_FILE) as target:
        stream_tensors(target.stream, {key: trained[name].data for key, name in files.items()}, read)
