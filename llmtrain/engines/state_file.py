"""The files that hold the pieces of a run: a sequence of safetensors files for each rank.

`engine/rank_NNNNN.0.safetensors` holds the first list of a rank's pieces, and so on. The files contain tensors only, no
pickle. The file's header describes each tensor, so that tensors are found without reading the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from llmtrain.engines.pieces import Piece, Region
from llmtrain.engines.tensor_file import head
from llmtrain.engines.writer import Part, Writer
from llmtrain.errors import CheckpointError, Problem
from llmtrain.piece_heads import read_head
from llmtrain.untrusted import UNREADABLE, utf8_name, why

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
        pieces = read_head(file)
    except UNREADABLE as error:
        raise CheckpointError(Problem("checkpoint.head", str(file), why(error))) from None
    for index, piece in enumerate(pieces):
        region = Region.from_json(piece.region.model_dump())
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
    return [head(tensors, {"pieces": json.dumps([_described(piece) for piece in pieces])}), *tensors.values()]


def _described(piece: Piece) -> dict[str, Any]:
    return {
        "name": piece.name,
        "region": piece.region.to_json(),
        "start": piece.start,
        "numel": piece.numel,
        "kinds": list(piece.tensors),
        "steps": None if piece.steps is None else piece.steps.item(),
    }
