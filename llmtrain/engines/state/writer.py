"""The destination of an engine's state: one rank's files of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from llmtrain.system.durable import FileHash, create

Part = bytes | Tensor
"""A part of a file's content: bytes, or those of a contiguous tensor on any device."""


class Writer(ABC):
    """Receives the files of a rank. Names are relative, with slashes."""

    @abstractmethod
    def file(self, name: str, parts: Sequence[Part], private: bool = False) -> None:
        """Receives a file. The tensors belong to the engine, and may change after the call.

        private: whether only the rank that wrote it reads it again.
        """

    def tensors(self, name: str, value: Mapping[str, Tensor], private: bool = False) -> None:
        """Receives small tensors, which are serialized in memory as safetensors."""
        self.file(name, [safetensors_bytes(dict(value))], private)

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


def size_of(part: Part) -> int:
    """Returns the size of a part in bytes."""
    return len(part) if isinstance(part, bytes) else part.numel() * part.element_size()


def on_host(part: Part) -> bytes | memoryview:
    """Returns the bytes of a part."""
    if isinstance(part, bytes):
        return part
    content: memoryview = part.detach().cpu().view(torch.uint8).numpy().data
    return content
