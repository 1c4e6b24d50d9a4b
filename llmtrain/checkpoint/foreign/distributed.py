"""Reads folders of `torch.distributed.checkpoint`: of FSDP, FSDP2, torchtitan, Accelerate and others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.checkpoint.foreign.pickles import DTYPE_NAMES, Record, StoredTensor, fail, read_pickle, read_torch
from llmtrain.checkpoint.foreign.state import STEP, ForeignGroup, ForeignState, ForeignTensor, is_option, plain_number
from llmtrain.engines.state.shards import Chunk, WeightSlice

METADATA = ".metadata"
STATE = re.compile(
    r"(?:.*\.)?(?:optimizer|optim|optimizers?_\d+)\.state\.(.+)\.([A-Za-z0-9_]+)|state\.(.+)\.([A-Za-z0-9_]+)"
)
GROUP = re.compile(
    r"(?:.*\.)?(?:optimizer|optim|optimizers?_\d+)\.param_groups\.(.+)\.([A-Za-z0-9_]+)|param_groups\.(.+)\.([A-Za-z0-9_]+)"
)
STEPS = ("train_state.step", "trainer.global_step", "global_step", "step", "iteration", "global_steps")
"""Names under which programs keep the number of steps."""


@dataclass(frozen=True)
class _Item:
    """The place of a chunk or of an object in the files."""

    file: Path
    offset: int
    length: int

    def read(self) -> Any:
        return read_torch(self.file, self.offset, self.length)


def is_distributed(folder: Path) -> bool:
    """Whether a folder is one of `torch.distributed.checkpoint`."""
    return (folder / METADATA).is_file()


NO_WEIGHTS = ("lr_scheduler", "dataloader", "optim")
"""Beginnings of the names of tensors that are no weights."""


def read_distributed(folder: Path, others: Iterable[Path] = ()) -> ForeignState:
    """Reads a folder, and others that belong to it, such as that of the optimizer alone.

    Raises CheckpointError for what is not supported or not complete.
    """
    tensors: dict[str, ForeignTensor] = {}
    objects: dict[str, Callable[[], Any]] = {}
    for one in (folder, *others):
        found, read = read_parts(one)
        tensors |= {name: tensor.whole() for name, tensor in found.items()}
        objects |= read
    state = ForeignState("torch.distributed.checkpoint")
    options: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if match := STATE.fullmatch(name):
            weight, kind = match[1] or match[3], match[2] or match[4]
            if kind == STEP:
                state.updates[weight] = float(tensor.read().flatten()[0].item())
            else:
                state.states.setdefault(weight, {})[kind] = tensor
        elif GROUP.fullmatch(name):
            if math.prod(tensor.shape) == 1:
                _add_option(options, name, tensor.read().item())
        elif name in STEPS and math.prod(tensor.shape) == 1:
            state.step = int(tensor.read().item())
        elif name.startswith(NO_WEIGHTS):
            state.unread.append(name)
        else:
            state.weights[name] = tensor
    for name, read_object in objects.items():
        if match := STATE.fullmatch(name):
            weight, kind = match[1] or match[3], match[2] or match[4]
            if kind == STEP:
                state.updates[weight] = plain_number(read_object())
        elif GROUP.fullmatch(name):
            value = read_object()
            _add_option(
                options, name, value.scalar() if isinstance(value, StoredTensor) and value.numel == 1 else value
            )
        elif name in STEPS:
            state.step = int(plain_number(read_object()))
        else:
            state.unread.append(name)
    state.unread = sorted({name.split(".")[0] for name in state.unread})
    _add_groups(options, state)
    return state


def _add_option(options: dict[str, dict[str, Any]], name: str, value: Any) -> None:
    match = GROUP.fullmatch(name)
    assert match
    key = match[2] or match[4]
    if is_option(value) or (key == "params" and isinstance(value, list) and all(isinstance(one, str) for one in value)):
        options.setdefault(match[1] or match[3], {})[key] = value


def _add_groups(options: Mapping[str, Mapping[str, Any]], state: ForeignState) -> None:
    """Makes groups of weights with equal options. Some programs keep these for each weight, some for each group."""
    groups: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for name, values in options.items():
        known = {key: value for key, value in values.items() if key != "params"}
        params = values.get("params")
        names = [str(one) for one in params] if isinstance(params, list | tuple) else [] if name.isdigit() else [name]
        groups.setdefault(repr(sorted(known.items(), key=str)), ([], known))[0].extend(names)
    state.groups += [ForeignGroup(tuple(names), values) for names, values in groups.values()]


@dataclass(frozen=True)
class DistributedTensor:
    """A tensor of a folder, in parts that lie in its files."""

    folder: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], _Item], ...]
    """The offsets and sizes of each part, and its place in the files."""

    def whole(self) -> ForeignTensor:
        """Returns it as a tensor that is read on demand."""
        return ForeignTensor(self.shape, self.dtype, self._read)

    def layers(self) -> Iterator[tuple[int, ForeignTensor]]:
        """Yields the tensors stacked along its first dimension, with their numbers; each reads its own parts."""
        for number in range(self.shape[0]):
            yield number, ForeignTensor(self.shape[1:], self.dtype, partial(self._read_layer, number))

    def _read(self) -> Tensor:
        pieces = ((offsets, self._piece(sizes, item)) for offsets, sizes, item in self.parts if 0 not in sizes)
        return _assembled(self.shape, self.dtype, pieces)

    def _read_layer(self, number: int) -> Tensor:
        pieces = (
            (offsets[1:], self._piece(sizes, item)[number - offsets[0]])
            for offsets, sizes, item in self.parts
            if offsets[0] <= number < offsets[0] + sizes[0] and 0 not in sizes
        )
        return _assembled(self.shape[1:], self.dtype, pieces)

    def _piece(self, sizes: tuple[int, ...], item: _Item) -> Tensor:
        stored = item.read()
        if not isinstance(stored, StoredTensor) or stored.numel != math.prod(sizes):
            fail(item.file, f"does not hold the part of '{self.name}' that {METADATA} names")
        return stored.read().reshape(sizes)


def read_parts(folder: Path) -> tuple[dict[str, DistributedTensor], dict[str, Callable[[], Any]]]:
    """Returns the tensors of a folder, and functions that read its objects, by their names.

    Raises CheckpointError for what is not supported or not complete.
    """
    metadata = read_pickle(folder / METADATA)
    tensors: dict[str, DistributedTensor] = {}
    objects: dict[str, Callable[[], Any]] = {}
    try:
        described: Mapping[str, Record] = metadata.get("state_dict_metadata")
        chunks: dict[str, dict[tuple[int, ...], _Item]] = {}
        for index, info in metadata.get("storage_data").items():
            name, offset = index.get("fqn"), index.get("offset")
            path = info.get("relative_path")
            if "/" in path or path in ("", ".", "..") or info.get("transform_descriptors"):
                fail(folder, f"keeps '{name}' in {path!r}, outside the folder or in a form of its own")
            item = _Item(folder / path, info.get("offset"), info.get("length"))
            if offset is None:
                objects[name] = item.read
            else:
                chunks.setdefault(name, {})[tuple(offset)] = item
        for name, record in described.items():
            if record.name.endswith("BytesStorageMetadata"):
                continue
            shape, dtype = tuple(record.get("size")), _dtype(record.get("properties"))
            parts = [(tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))) for chunk in record.get("chunks")]
            placed = tuple((offsets, sizes, chunks[name][offsets]) for offsets, sizes in parts)
            _check_chunks(folder, name, shape, parts)
            tensors[name] = DistributedTensor(folder, name, shape, dtype, placed)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        fail(folder / METADATA, f"does not describe its tensors as torch does ({type(error).__name__}: {error})")
    return tensors, objects


def _dtype(properties: Record) -> torch.dtype:
    values = [*properties.arguments, *properties.attributes.values()]
    found: list[torch.dtype] = [
        value.dtype for value in values if isinstance(getattr(value, "dtype", None), torch.dtype)
    ]
    return found[0] if found else DTYPE_NAMES["float32"]


def _check_chunks(
    folder: Path, name: str, shape: tuple[int, ...], parts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    for offsets, sizes in parts:
        numbers = (*offsets, *sizes, *shape)
        lies_within = len(offsets) == len(sizes) == len(shape) and all(
            type(number) is int and number >= 0 for number in numbers
        )
        if not lies_within or any(a + b > c for a, b, c in zip(offsets, sizes, shape, strict=True)):
            fail(folder / METADATA, f"has a part of '{name}' that is not within its shape {list(shape)}")
    if sum(math.prod(sizes) for _, sizes in parts) != math.prod(shape):
        fail(folder, f"holds only a part of '{name}'", "complete the folder")


def _assembled(shape: tuple[int, ...], dtype: torch.dtype, pieces: Iterable[tuple[tuple[int, ...], Tensor]]) -> Tensor:
    whole: Tensor | None = None
    for offsets, piece in pieces:
        if tuple(piece.shape) == shape:
            return piece
        if whole is None:
            whole = torch.empty(shape, dtype=piece.dtype)
        WeightSlice(shape, (Chunk(offsets, tuple(piece.shape)),)).put(piece.flatten(), whole)
    return torch.empty(shape, dtype=dtype) if whole is None else whole
