"""Where an engine puts its state: one rank's files of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from llmtrain.durable import Fingerprint, create

Part = bytes | Tensor
"""Of a file's content: bytes, or those of a contiguous tensor on any device."""


class Writer(ABC):
    """Takes the files of a rank. Names are relative, with slashes."""

    @abstractmethod
    def file(self, name: str, parts: Sequence[Part], private: bool = False) -> None:
        """Takes a file. The tensors are the engine's own: they may change after the call.

        private: whether only the rank that wrote it reads it again.
        """

    def tensors(self, name: str, value: Mapping[str, Tensor], private: bool = False) -> None:
        """Takes tensors as safetensors; small ones, since they are put together in memory."""
        self.file(name, [safetensors_bytes(dict(value))], private)

    def text(self, name: str, value: str) -> None:
        """Takes a text, as UTF-8."""
        self.file(name, [value.encode()])


@dataclass(frozen=True)
class Written:
    """A file of a rank."""

    fingerprint: Fingerprint
    private: bool
    """Only the rank that wrote it reads it again, so on disks of the nodes' own it is needed nowhere else."""


class DiskWriter(Writer):
    """Writes files below `folder`, each one on the disk and fingerprinted when a method returns.

    The first OSError is kept in `error` and nothing is written after it: ranks save together, and one
    that left in the midst of it would leave the others waiting.
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
    """Bytes of a part."""
    return len(part) if isinstance(part, bytes) else part.numel() * part.element_size()


def on_host(part: Part) -> bytes | memoryview:
    """The bytes of a part."""
    if isinstance(part, bytes):
        return part
    content: memoryview = part.detach().cpu().view(torch.uint8).numpy().data
    return content
