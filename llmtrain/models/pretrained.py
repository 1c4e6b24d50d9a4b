"""Reads the weights of a model, by name, from a Hugging Face folder or a repository of the hub."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from llmtrain.errors import Problem, RecipeError
from llmtrain.models.hub_names import Incoming, aliases, empty_model
from llmtrain.recipe import ModelConfig
from llmtrain.system.durable import fingerprint
from llmtrain.system.untrusted import UNREADABLE, open_regular, read_json, why

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MOST = 5
"""Largest number of weights that an error message lists."""


class Pretrained:
    """The weights of a folder. Only one, or the few that belong together, are in memory at a time."""

    def __init__(self, incoming: Incoming, files: dict[str, Path]) -> None:
        self._incoming = incoming
        self._files = files
        self._open: dict[Path, Any] = {}

    def tensor(self, name: str) -> Tensor:
        """Returns a weight, given its name in the model, in the dtype of the file."""
        return self._incoming.tensor(name, self._read)

    def _read(self, key: str) -> Tensor:
        file = self._files[key]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        tensor: Tensor = self._open[file].get_tensor(key)
        return tensor


def read_pretrained(source: ModelConfig, config: PreTrainedConfig) -> Pretrained:
    """Opens the weights of `model.pretrained`, of whose files only the headers are read.

    Raises RecipeError if the files lack a weight of the model, which `transformers` would initialize at random, or if a
    weight has a different shape.
    """
    files = _files(source)
    model = empty_model(config, torch.float32, source.trust_remote_code)
    incoming = Incoming(model, _shapes(files))
    own = {name: group for name, group in aliases(model).items() if name == group[0]}
    problems = []
    if missing := [name for name in own if not incoming.has(name)]:
        message = f"{source.pretrained} lacks {len(missing)} of {len(own)} weights of the model: {_some(missing)}"
        fix = "name a folder that was saved with them; model.config may not ask for more than it has"
        problems.append(Problem("model.pretrained_names", "model.pretrained", message, fix))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    wrong = [name for name in own if incoming.has(name) and incoming.shape(name) != shapes[name]]
    if wrong:
        name = wrong[0]
        message = (
            f"{source.pretrained} has {len(wrong)} weights of another shape than the model, as '{name}': "
            f"{list(incoming.shape(name))} for {list(shapes[name])}"
        )
        fix = "leave out the fields of model.config that change sizes"
        problems.append(Problem("model.pretrained_shapes", "model.pretrained", message, fix))
    if problems:
        raise RecipeError(problems)
    return Pretrained(incoming, files)


def hash_of_weights(source: ModelConfig) -> str:
    """Returns a hash of the files of `model.pretrained`.

    In the hub's cache a file links to one whose name is its hash; all others are read. Raises RecipeError if there are
    none.
    """
    digest = hashlib.sha256()
    for file in sorted(set(_files(source).values())):
        target = file.resolve()
        is_named = file.is_symlink() and target.parent.name == "blobs"
        digest.update(f"{file.name} {target.name if is_named else fingerprint(file).xxh3_128}\n".encode())
    return digest.hexdigest()[:16]


def _files(source: ModelConfig) -> dict[str, Path]:
    """Maps each tensor of a local folder or hub repository to its file."""
    assert source.pretrained is not None
    folder = Path(source.pretrained)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = ["model*.safetensors", INDEX]  # a repository may hold the weights again under other names
        folder = Path(snapshot_download(source.pretrained, revision=source.revision, allow_patterns=patterns))
    if (folder / INDEX).is_file():
        files = {name: folder / file for name, file in _index(folder / INDEX).items()}
        if gone := sorted({file.name for file in files.values() if not file.is_file()}):
            message = f"{folder} lacks {len(gone)} of the files that its index names: {_some(gone)}"
            raise RecipeError(Problem("model.safetensors", "model.pretrained", message, "complete the folder"))
        return files
    found = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not found:
        raise RecipeError(Problem("model.safetensors", "model.pretrained", f"there are no safetensors in {folder}"))
    return {name: file for file in found for name in _heads(file)}


class _Index(BaseModel):
    weight_map: dict[str, str]


def _index(file: Path) -> dict[str, str]:
    try:
        return read_json(file, _Index).weight_map
    except UNREADABLE as error:
        message = f"{file} cannot be read: {why(error)}"
    raise RecipeError(Problem("model.safetensors", "model.pretrained", message, "fetch it again"))


def _shapes(files: dict[str, Path]) -> dict[str, Tensor]:
    heads = {file: _heads(file) for file in dict.fromkeys(files.values())}
    return {name: heads[file][name] for name, file in files.items() if name in heads[file]}


def _heads(file: Path) -> dict[str, Tensor]:
    """Maps each name in a file to a meta tensor of its shape. Raises RecipeError if it is not a safetensors file."""
    try:
        open_regular(file).close()  # safetensors would block on a FIFO
        with safe_open(file, framework="pt") as tensors:
            return {name: torch.empty(tensors.get_slice(name).get_shape(), device="meta") for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        message = f"{file} cannot be read: {error}"
    raise RecipeError(Problem("model.safetensors", "model.pretrained", message, "fetch it again"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST]) + (", ..." if len(names) > MOST else "")
