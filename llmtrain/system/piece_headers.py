"""Reads and validates the headers of piece files: safetensors whose metadata describe each piece.

Works without torch, since the launcher reads them too. After `read_header`, the safetensors library can open the file,
and each tensor that a piece mentions exists, is one-dimensional, and has a valid length and type.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from llmtrain.system.untrusted import open_regular, parse_json, read_up_to

MAX_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, as in the library."""
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Data type, as safetensors names it → bytes of an element."""
WEIGHT = "weight"
"""The kind of tensor that is trained: fp32 if the engine keeps such a copy. The others belong to an optimizer."""
CODE = "_code"
"""Suffix of the kinds that are 8-bit codes, each of which stands for a fraction of a block's scale."""
SCALE = "_scale"
"""Suffix of the kinds that are scales: one for each block of a weight. Ranks that hold parts of a block all have it."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Counts = Annotated[tuple[Count, ...], Field(max_length=64)]
Kind = Annotated[str, Field(max_length=100, pattern=r"^\w+$")]
"""A word. Its length is not part of the pattern, which would take 50 ms to compile when a command starts."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class BoxHeader(_Part):
    """A part of a whole weight: a range in each dimension."""

    first: Counts
    size: Counts


class RegionHeader(_Part):
    """The part of a weight that a rank holds (`engines.state.shards.WeightSlice`)."""

    shape: Counts
    boxes: Annotated[tuple[BoxHeader, ...], Field(min_length=1)]
    dim: Count

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(math.prod(box.size) for box in self.boxes)

    @model_validator(mode="after")
    def _lies_within(self) -> Self:
        if self.dim >= max(1, len(self.shape)):
            raise ValueError(f"joins along dimension {self.dim} of {len(self.shape)}")
        for box in self.boxes:
            if not len(box.first) == len(box.size) == len(self.shape):
                raise ValueError("has a box with another number of dimensions")
            if any(first + size > whole for first, size, whole in zip(box.first, box.size, self.shape, strict=True)):
                raise ValueError("has a box that is not within the weight")
            if len(self.boxes) > 1 and self._beside(box) != self._beside(self.boxes[0]):
                raise ValueError("has boxes that cannot be joined")
        return self

    def _beside(self, box: BoxHeader) -> tuple[int, ...]:
        return (*box.size[: self.dim], *box.size[self.dim + 1 :])


class PieceHeader(_Part):
    """A flat range of a region, and the kinds of tensors stored for it."""

    name: Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f]+$")]
    region: RegionHeader
    start: Count
    numel: Annotated[Count, Field(gt=0)]
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1, max_length=100)]
    steps: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None

    @model_validator(mode="after")
    def _lies_within(self) -> Self:
        if self.start + self.numel > self.region.numel:
            raise ValueError(f"elements {self.start} to {self.start + self.numel} of {self.region.numel}")
        return self


class _Tensor(_Part):
    dtype: str
    shape: Counts
    data_offsets: tuple[Count, Count]


def read_header(file: Path) -> list[PieceHeader]:
    """Reads the descriptions of the pieces in a file. Raises OSError or ValueError if the file is invalid."""
    metadata, tensors = _read(file)
    if "pieces" not in metadata:
        raise ValueError("has no list of pieces in its header")
    pieces = parse_json(metadata["pieces"], list[PieceHeader])
    expected = {f"{index}.{kind}": piece for index, piece in enumerate(pieces) for kind in piece.kinds}
    if tensors.keys() != expected.keys():
        unexpected = sorted(tensors.keys() ^ expected.keys())[0]
        raise ValueError(f"its tensors do not match its list of pieces, such as {unexpected[:100]!r}")
    for name, piece in expected.items():
        tensor = tensors[name]
        if tensor.shape != (piece.numel,):
            raise ValueError(f"{name} of '{piece.name}' has the shape {list(tensor.shape)}, not [{piece.numel}]")
        if name.endswith(CODE):
            if tensor.dtype != "U8":
                raise ValueError(f"{name} of '{piece.name}' is {tensor.dtype}, but codes are U8")
        # Only untrained tensors may have types without an F, which are not floating point: some buffers contain counts.
        elif piece.kinds != (WEIGHT,) and "F" not in tensor.dtype:
            raise ValueError(f"{name} of '{piece.name}' is {tensor.dtype}, but trained tensors are floating point")
    return pieces


def _read(file: Path) -> tuple[dict[str, str], dict[str, _Tensor]]:
    with open_regular(file) as content:
        size = os.fstat(content.fileno()).st_size
        length = int.from_bytes(read_up_to(content, 8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"has a head of {length:,} bytes in a file of {size:,}")
        head = parse_json(read_up_to(content, length), dict[str, _Tensor | dict[str, str]])
    metadata = head.pop("__metadata__", {})
    tensors = {name: tensor for name, tensor in head.items() if isinstance(tensor, _Tensor)}
    if not isinstance(metadata, dict) or tensors.keys() != head.keys():
        raise ValueError("has a header that is not a safetensors header")
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        width = WIDTHS.get(tensor.dtype)
        if width is None:
            raise ValueError(f"{name[:100]!r} has an unknown type, {tensor.dtype[:20]!r}")
        if tensor.data_offsets != (end, end + width * math.prod(tensor.shape)):
            raise ValueError(f"{name[:100]!r} is not at the offset that its length and those of the others give")
        end = tensor.data_offsets[1]
    if 8 + length + end != size:
        raise ValueError(f"has {size:,} bytes, but its header describes {8 + length + end:,}")
    return metadata, tensors
