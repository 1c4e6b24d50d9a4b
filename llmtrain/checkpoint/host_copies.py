"""Copies what a rank saves to host memory, so that training continues while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmtrain.engines.writer import Part, Writer, size_of


@dataclass(frozen=True)
class _Copied:
    name: str
    content: Tensor
    """The file's bytes, in host memory."""
    private: bool


class HostCopies(Writer):
    """Receives the files of successive saves into the same memory.

    The memory is kept, since fresh pages are slow to touch, and pinned pages, to which a device copies at full speed,
    are slower still to allocate (PyTorch's DCP keeps its staging buffers for the same reason).
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._files: list[_Copied] = []
        self._copied: torch.cuda.Event | None = None

    def file(self, name: str, parts: Sequence[Part], private: bool = False) -> None:
        """Copies a file; from a device in the order of its stream, without waiting."""
        on_device = any(isinstance(part, Tensor) and part.is_cuda for part in parts)
        content = self._buffer(name, sum(map(size_of, parts)), on_device)
        offset = 0
        for part in parts:
            target = content[offset : offset + size_of(part)]
            if isinstance(part, bytes):
                target.numpy()[:] = np.frombuffer(part, dtype=np.uint8)
            else:
                target.copy_(part.detach().view(torch.uint8), non_blocking=True)
            offset += size_of(part)
        if on_device:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        self._files.append(_Copied(name, content, private))

    def start_anew(self) -> None:
        """Forgets the files of the previous save; their memory is reused."""
        self._files = []

    def write(self, writer: Writer) -> None:
        """Passes the copies on; waits for the device that they come from, if any."""
        if self._copied is not None:
            self._copied.synchronize()
        for file in self._files:
            writer.file(file.name, [file.content], file.private)

    def _buffer(self, name: str, size: int, pinned: bool) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.is_pinned() < pinned:
            self._buffers[name] = buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return buffer[:size]
