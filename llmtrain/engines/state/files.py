"""The files that hold the pieces of a run: a sequence of safetensors files for each rank, written in parts.

`engine/rank_NNNNN.0.safetensors` holds the first list of a rank's pieces, and so on. The files contain tensors only, no
pickle. The file's header describes each tensor, so that tensors are found without reading the rest. The library's own
writer needs all bytes of a file at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from llmtrain.engines.state.pieces import Box, Piece, Region
from llmtrain.engines.state.writer import Late, Part, Writer, head, on_host
from llmtrain.errors import CheckpointError, Problem
from llmtrain.system.piece_headers import read_header
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_bytes, utf8_name


def stream_tensors(stream: BinaryIO, like: Mapping[str, Tensor], tensor: Callable[[str], Tensor]) -> None:
    """Writes a file in the form that `transformers` uses, requesting one tensor after the other.

    like: by name, a tensor of the same shape and dtype without memory. Tensors with wide elements come first, so that
    all are aligned. Raises ValueError if a tensor has another shape or dtype.
    """
    ordered = {name: like[name] for name in sorted(like, key=lambda name: -like[name].element_size())}
    stream.write(head(ordered, {"format": "pt"}))
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
            found = tensors[name]
            if (found.dtype, found.ndim, found.shape[1:]) != (expected.dtype, expected.ndim, expected.shape[1:]):
                text = f"{found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
                raise ValueError(f"'{name}' is {text}")
        return tensors
    except (*UNREADABLE, SafetensorError) as error:
        raise CheckpointError(Problem("checkpoint.content", str(path), file_fault(error))) from None


FOLDER = "engine"
"""Folder of these files in a checkpoint."""


@dataclass(frozen=True)
class Stored:
    """A piece in a file."""

    file: Path
    index: int
    """Index of the piece in its file."""
    name: str
    region: Region
    start: int
    numel: int
    kinds: tuple[str, ...]
    steps: float | None


class Files:
    """Open files of pieces; each header is parsed once."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def read(self, stored: Stored, kind: str, first: int, last: int) -> Tensor:
        """Returns elements `first` to `last` of the flat region; the piece must contain them."""
        if stored.file not in self._open:
            with utf8_name(stored.file.parent) as folder:
                self._open[stored.file] = safe_open(folder / stored.file.name, framework="pt")
        part = self._open[stored.file].get_slice(_key(stored.index, kind))
        tensor: Tensor = part[first - stored.start : last - stored.start]
        return tensor


def write(writer: Writer, rank: int, lists: Iterable[list[Piece]]) -> None:
    """Writes this rank's share of each piece, in one file per list."""
    for number, pieces in enumerate(lists):
        shares = [share for piece in pieces if (share := piece.share()).numel]
        if not shares:
            continue
        # If ranks hold copies, each saves a part of them, so all of these ranks read all parts.
        private = all(piece.copy == (0, 1) for piece in pieces)
        writer.file(f"{FOLDER}/rank_{rank:05d}.{number}.safetensors", _content(shares), private)


def read_index(folder: Path, rank: int | None = None) -> Iterator[Stored]:
    """Yields every piece in the files of a checkpoint, or of one rank. Raises CheckpointError for an invalid header."""
    whose = "*" if rank is None else f"{rank:05d}"
    for file in sorted((folder / FOLDER).glob(f"rank_{whose}.*.safetensors")):
        yield from _read_header(file)


def _read_header(file: Path) -> Iterator[Stored]:
    try:
        pieces = read_header(file)
    except UNREADABLE as error:
        raise CheckpointError(Problem("checkpoint.head", str(file), file_fault(error))) from None
    for index, piece in enumerate(pieces):
        boxes = tuple(Box(box.first, box.size) for box in piece.region.boxes)
        region = Region(piece.region.shape, boxes, piece.region.dim)
        yield Stored(file, index, piece.name, region, piece.start, piece.numel, piece.kinds, piece.steps)


def _key(index: int, kind: str) -> str:
    return f"{index}.{kind}"


def _content(pieces: list[Piece]) -> list[Part]:
    """Returns the parts of a safetensors file. The library's own writer would copy all tensors."""
    tensors = {
        _key(index, kind): tensor.detach()
        for index, piece in enumerate(pieces)
        for kind, tensor in piece.tensors.items()
    }
    counted = [piece.steps.reshape(()) for piece in pieces if piece.steps is not None]

    def beginning(numbers: list[float]) -> bytes:
        steps = iter(numbers)
        described = [_described(piece, None if piece.steps is None else next(steps)) for piece in pieces]
        return head(tensors, {"pieces": json.dumps(described)})

    # An optimizer counts on its device, which is not waited for here.
    first = Late(torch.stack(counted), beginning) if counted else beginning([])
    return [first, *tensors.values()]


def _described(piece: Piece, steps: float | None) -> dict[str, Any]:
    return {
        "name": piece.name,
        "region": asdict(piece.region),
        "start": piece.start,
        "numel": piece.numel,
        "kinds": list(piece.tensors),
        "steps": steps,
    }
