"""The files that hold the shards of a checkpoint: a sequence of safetensors files for each rank, written in parts.

`engine/rank_NNNNN.0.safetensors` holds the first list of a rank's shards, and so on. The files contain tensors only, no
pickle. The file's header describes each tensor, so that tensors are found without reading the rest. The library's own
writer needs all bytes of a file at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from llmtrain.engines.state.shards import CheckpointShard, Chunk, ReplicaIndex, WeightSlice
from llmtrain.engines.state.writer import DeferredBytes, Part, Writer, on_host, safetensors_header
from llmtrain.errors import CheckpointError, Problem
from llmtrain.system.piece_headers import read_header
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_bytes, utf8_name


def stream_tensors(stream: BinaryIO, like: Mapping[str, Tensor], tensor: Callable[[str], Tensor]) -> None:
    """Writes a file in the form that `transformers` uses, requesting one tensor after the other.

    like: by name, a tensor of the same shape and dtype without memory. Tensors with wide elements come first, so that
    all are aligned. Raises ValueError if a tensor has another shape or dtype.
    """
    ordered = {name: like[name] for name in sorted(like, key=lambda name: -like[name].element_size())}
    stream.write(safetensors_header(ordered, {"format": "pt"}))
    for name, expected in ordered.items():
        value = tensor(name)
        if (value.shape, value.dtype) != (expected.shape, expected.dtype):
            raise ValueError(f"'{name}' is {value.dtype} {list(value.shape)}, but must be {expected}")
        stream.write(on_host(value.contiguous().view(-1)))


def read_tensors(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a small file. Raises CheckpointError if it cannot be read, or lacks one of `like`.

    like: by name, a tensor of the same dtype and shape; only the first dimension may have another length.
    """
    try:
        tensors: dict[str, Tensor] = load(read_bytes(path))
        for name, expected in like.items():
            if name not in tensors:
                raise ValueError(f"has no tensor '{name}'")
            tensor = tensors[name]
            if (tensor.dtype, tensor.ndim, tensor.shape[1:]) != (expected.dtype, expected.ndim, expected.shape[1:]):
                text = f"{tensor.dtype} {list(tensor.shape)}, not {expected.dtype} {list(expected.shape)}"
                raise ValueError(f"'{name}' is {text}")
        return tensors
    except (*UNREADABLE, SafetensorError) as error:
        raise CheckpointError(Problem("checkpoint.content", str(path), file_fault(error))) from None


FOLDER = "engine"
"""Folder of these files in a checkpoint."""


@dataclass(frozen=True)
class StoredShard:
    """A shard in a file, as the file's header describes it."""

    file: Path
    index: int
    """Index of the shard in its file."""
    name: str
    weight_slice: WeightSlice
    start: int
    numel: int
    kinds: tuple[str, ...]
    steps: float | None


class ShardFiles:
    """Open files of shards; each header is parsed once."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def read(self, shard: StoredShard, kind: str, first: int, end: int) -> Tensor:
        """Returns elements `first` to `end` of the flat slice; the shard must contain them."""
        if shard.file not in self._open:
            with utf8_name(shard.file.parent) as folder:
                self._open[shard.file] = safe_open(folder / shard.file.name, framework="pt")
        content = self._open[shard.file].get_slice(_key(shard.index, kind))
        tensor: Tensor = content[first - shard.start : end - shard.start]
        return tensor


def write(writer: Writer, rank: int, lists: Iterable[list[CheckpointShard]]) -> None:
    """Writes what this rank saves of each shard, in one file per list."""
    for number, shards in enumerate(lists):
        parts = [part for shard in shards if (part := shard.saved_part()).numel]
        if not parts:
            continue
        # If ranks hold replicas, each saves a part of them, so all of these ranks read all parts.
        private = all(shard.replica == ReplicaIndex() for shard in shards)
        writer.file(f"{FOLDER}/rank_{rank:05d}.{number}.safetensors", _content(parts), private)


def read_index(folder: Path, rank: int | None = None) -> Iterator[StoredShard]:
    """Yields every shard in the files of a checkpoint, or of one rank. Raises CheckpointError for an invalid header."""
    pattern = "*" if rank is None else f"{rank:05d}"
    for file in sorted((folder / FOLDER).glob(f"rank_{pattern}.*.safetensors")):
        yield from _read_header(file)


def _read_header(file: Path) -> Iterator[StoredShard]:
    try:
        headers = read_header(file)
    except UNREADABLE as error:
        raise CheckpointError(Problem("checkpoint.head", str(file), file_fault(error))) from None
    for index, header in enumerate(headers):
        region = header.region
        chunks = tuple(Chunk(box.first, box.size) for box in region.boxes)
        weight_slice = WeightSlice(region.shape, chunks, region.dim)
        yield StoredShard(
            file, index, header.name, weight_slice, header.start, header.numel, header.kinds, header.steps
        )


def _key(index: int, kind: str) -> str:
    return f"{index}.{kind}"


def _content(shards: list[CheckpointShard]) -> list[Part]:
    """Returns the parts of a safetensors file. The library's own writer would copy all tensors."""
    tensors = {
        _key(index, kind): tensor.detach()
        for index, shard in enumerate(shards)
        for kind, tensor in shard.tensors.items()
    }
    counts = [shard.steps.reshape(()) for shard in shards if shard.steps is not None]

    def header(numbers: list[float]) -> bytes:
        steps = iter(numbers)
        described = [_described(shard, None if shard.steps is None else next(steps)) for shard in shards]
        return safetensors_header(tensors, {"pieces": json.dumps(described)})

    # An optimizer counts on its device, which is not waited for here.
    first = DeferredBytes(torch.stack(counts), header) if counts else header([])
    return [first, *tensors.values()]


def _described(shard: CheckpointShard, steps: float | None) -> dict[str, Any]:
    """Returns what the file's header says about a shard, which `system.piece_headers.PieceHeader` reads."""
    weight_slice = shard.weight_slice
    return {
        "name": shard.name,
        "region": {
            "shape": weight_slice.shape,
            "boxes": [{"first": chunk.offsets, "size": chunk.sizes} for chunk in weight_slice.chunks],
            "dim": weight_slice.dim,
        },
        "start": shard.start,
        "numel": shard.numel,
        "kinds": list(shard.tensors),
        "steps": steps,
    }
