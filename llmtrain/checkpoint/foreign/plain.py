"""Reads folders with a whole optimizer: `checkpoint-N` of the Trainer, and `save_state` of Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmtrain.checkpoint.foreign.pickles import DTYPE_NAMES, StoredTensor, fail, read_torch
from llmtrain.checkpoint.foreign.state import (
    ForeignGroup,
    ForeignState,
    ForeignTensor,
    options_of,
    split_state,
    unnamed_optimizer,
)
from llmtrain.errors import abbreviate
from llmtrain.system.hub import INDEX, SINGLE
from llmtrain.system.untrusted import UNREADABLE, file_fault, open_regular, read_json

OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0.bin")
PICKLED = ("pytorch_model.bin", "pytorch_model_fsdp.bin", "model.pt", "model.bin")
PICKLED_INDEX = "pytorch_model.bin.index.json"
TRAINER_STATE = "trainer_state.json"
SAFE_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64", "I64": "int64", "I32": "int32"}


def is_plain(folder: Path) -> bool:
    """Whether a folder has the optimizer's state in one file."""
    return any((folder / name).is_file() for name in OPTIMIZERS)


def read_plain(folder: Path) -> ForeignState:
    """Reads a folder. Raises CheckpointError for what is not supported or not complete."""
    is_trainer = (folder / TRAINER_STATE).is_file()
    state = ForeignState("Trainer" if is_trainer else "Accelerate", steps_of_trainer(folder))
    state.weights = read_weights(folder)
    file = next(folder / name for name in OPTIMIZERS if (folder / name).is_file())
    optimizer = read_torch(file)
    optimizer = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else optimizer
    if not isinstance(optimizer, dict) or not {"state", "param_groups"} <= optimizer.keys():
        fail(file, "is not the state of a torch optimizer (it has no state and param_groups)")
    if all(isinstance(name, str) for name in optimizer["state"]) and optimizer["state"]:
        _add_named(optimizer, state)
    else:
        state.unnamed = unnamed_optimizer(optimizer, str(file))
    state.unread = unread_files(folder)
    return state


def _add_named(optimizer: dict[str, Any], state: ForeignState) -> None:
    """Adds a state that names its weights, as FSDP gathers it."""
    for group in optimizer["param_groups"]:
        names = tuple(group["params"])
        state.groups.append(ForeignGroup(names, options_of(group)))
        for name in names:
            tensors, state.updates[name] = split_state(optimizer["state"].get(name, {}), options_of(group))
            state.states[name] = {kind: ForeignTensor.of(tensor) for kind, tensor in tensors.items()}


def steps_of_trainer(folder: Path) -> int | None:
    """Returns the number of steps in the Trainer's state; None if there is none, or if it cannot be read."""
    try:
        return int(read_json(folder / TRAINER_STATE, dict[str, Any])["global_step"])
    except (*UNREADABLE, KeyError, TypeError, ValueError):
        return None


def unread_files(folder: Path) -> list[str]:
    """Returns what an import leaves out, of the files of the Trainer and of Accelerate, besides random states."""
    kinds = {
        "scheduler": "the state of its schedule",
        "sampler": "its data sampler",
        "dl_state": "its data loader",
        "scaler": "the loss scale",
        "custom_checkpoint": "objects registered with Accelerate",
        "training_args": "the Trainer's arguments",
    }
    names = [path.name for path in folder.iterdir()]
    if TRAINER_STATE in names and steps_of_trainer(folder) is None:
        kinds[TRAINER_STATE] = f"the step in {TRAINER_STATE}, which cannot be read"
    return list(dict.fromkeys(what for kind, what in kinds.items() if any(name.startswith(kind) for name in names)))


def read_weights(folder: Path) -> dict[str, ForeignTensor]:
    """Reads the weights of a folder, from safetensors or pickles; in one file or in several."""
    if (folder / SINGLE).is_file():
        return _safetensors(folder / SINGLE)
    if (folder / INDEX).is_file():
        return {key: value for file in _indexed(folder, INDEX) for key, value in _safetensors(file).items()}
    files = [folder / name for name in PICKLED if (folder / name).is_file()][:1]
    if (folder / PICKLED_INDEX).is_file():
        files = _indexed(folder, PICKLED_INDEX)
    if not files:
        adapter = (folder / "adapter_config.json").is_file()
        what = "has an adapter, whose training is not imported" if adapter else f"has no weights ({SINGLE})"
        fail(folder, what, "import a folder with the whole model")
    weights: dict[str, ForeignTensor] = {}
    for file in files:
        content = read_torch(file)
        if not isinstance(content, dict):
            fail(file, "holds no weights by name")
        content = content.get("model", content) if isinstance(content.get("model"), dict) else content
        weights |= {key: ForeignTensor.of(value) for key, value in content.items() if isinstance(value, StoredTensor)}
    return weights


def _indexed(folder: Path, index: str) -> list[Path]:
    try:
        names = sorted(set(read_json(folder / index, dict[str, Any])["weight_map"].values()))
    except (*UNREADABLE, KeyError, TypeError, AttributeError) as error:
        fail(folder / index, f"cannot be read: {file_fault(error)}")
    if outside := [name for name in names if "/" in name or name in (".", "..")]:
        fail(folder / index, f"names files outside its folder: {abbreviate(outside)}")
    if lacking := [name for name in names if not (folder / name).is_file()]:
        fail(folder, f"lacks files that its index names: {abbreviate(lacking)}", "complete the folder")
    return [folder / name for name in names]


def _safetensors(file: Path) -> dict[str, ForeignTensor]:
    try:
        open_regular(file).close()
        opened: Any = safe_open(file, framework="pt")
        found = {}
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            dtype = DTYPE_NAMES[SAFE_TYPES[part.get_dtype()]] if part.get_dtype() in SAFE_TYPES else torch.uint8
            found[name] = ForeignTensor(tuple(part.get_shape()), dtype, _reader(opened, name))
        return found
    except (SafetensorError, OSError) as error:
        fail(file, f"cannot be read: {error}")


def _reader(opened: Any, name: str) -> Any:
    def read() -> Tensor:
        tensor: Tensor = opened.get_tensor(name)
        return tensor

    return read
