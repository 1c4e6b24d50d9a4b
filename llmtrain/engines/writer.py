"""Where an engine puts its state: one rank's files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from llmtrain.durable import Fingerprint, create


@dataclass(frozen=True)
class Written:
    """A file of a rank."""

    fingerprint: Fingerprint
    private: bool
    """Only the rank that wrote it reads it again, so on disks of the nodes' own it is needed nowhere else."""


class Writer:
    """Writes files below `folder`, each one on the disk and fingerprinted when a method returns.

    The first OSError is kept in `error` and nothing is written after it: ranks save together, and one
    that left in the midst of it would leave the others waiting. Names are relative, with slashes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Written] = {}
        self.error: OSError | None = None

    def tensors(self, name: str, value: Mapping[str, Tensor], private: bool = False) -> None:
        """Writes tensors as safetensors; small ones, since they are put together in memory."""
        self._write(name, lambda stream: stream.write(safetensors_bytes(dict(value))), private)

    def stream(self, name: str, write: Callable[[BinaryIO], object], private: bool = False) -> None:
        """Writes what a function writes to the file that it is given."""
        self._write(name, write, private)

    def text(self, name: str, value: str) -> None:
        """Writes a text in UTF-8."""
        self._write(name, lambda stream: stream.write(value.encode()), private=False)

    def _write(self, name: str, write: Callable[[BinaryIO], object], private: bool) -> None:
        if self.error is not None:
            return
        try:
            with create(self.folder / name) as file:
                write(file.stream)
        except OSError as error:
            self.error = error
        else:
            self.files[name] = Written(file.fingerprint, private)
