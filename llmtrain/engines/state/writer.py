"""The destination of an engine's state: one rank's files of a checkpoint."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.system.durable import FileHash, create


@dataclass(frozen=True)
class DeferredBytes:
    """Bytes that depend on numbers on a device. They are made once the numbers are on the host."""

    numbers: Tensor
    """One-dimensional."""
    make: Callable[[list[float]], bytes]


Part = bytes | Tensor | DeferredBytes
"""A part of a file's content: bytes, or those of a contiguous tensor on any device."""


DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"} | {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names (https://github.com/huggingface/safetensors) for the dtypes that a model may have."""


def safetensors_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Returns the beginning of a file, which the tensors follow in their order.

    tensors: only their shapes and dtypes are used, so they may be on the meta device.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor_bytes(tensor)
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Writer(ABC):
    """Receives the files of a rank. Names are relative, with slashes."""

    @abstractmethod
    def file(self, name: str, parts: Sequence[Part], private: bool = False) -> None:
        """Receives a file. The tensors belong to the engine, and may change after the call.

        private: whether only the rank that wrote it reads it again.
        """

    def tensors(self, name: str, value: Mapping[str, Tensor], private: bool = False) -> None:
        """Receives the tensors of a safetensors file."""
        self.file(
            name, [safetensors_header(value, {}), *(tensor.detach().reshape(-1) for tensor in value.values())], private
        )

    def text(self, name: str, value: str) -> None:
        """Receives a text, as UTF-8."""
        self.file(name, [value.encode()])


@dataclass(frozen=True)
class Written:
    """A file of a rank."""

    fingerprint: FileHash
    private: bool
    """Whether only the rank that wrote the file reads it again. On node-local disks, no other node needs it then."""


class DiskWriter(Writer):
    """Writes files below `folder`; when a method returns, its file is on the disk and has a fingerprint.

    The first OSError is kept in `error`, and nothing is written after it. Ranks save together, and a rank that stopped
    during a save would leave the others waiting.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Written] = {}
        self.error: OSError | None = None

    def file(self, name: str, parts: Sequence[Part], private: bool = False) -> None:
        """Writes a file."""
        if self.error is not None:
            return
        try:
            with create(self.folder / name) as file:
                for part in parts:
                    file.stream.write(on_host(part))
        except OSError as error:
            self.error = error
        else:
            self.files[name] = Written(file.fingerprint, private)


def tensor_bytes(tensor: Tensor) -> int:
    """Returns the size of a tensor in bytes."""
    return tensor.numel() * tensor.element_size()


def on_host(part: Part) -> bytes | memoryview:
    """Returns the bytes of a part; waits for the device that it is on, if any."""
    if isinstance(part, bytes):
        return part
    if isinstance(part, DeferredBytes):
        return part.make(part.numbers.tolist())
    content: memoryview = part.detach().cpu().view(torch.uint8).numpy().data
    return content
