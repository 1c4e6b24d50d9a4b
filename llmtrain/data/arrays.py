"""Flat arrays on disk: appended to while they are made, memory-mapped afterwards."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llmtrain.errors import DataError, Problem

BUFFER_BYTES = 1 << 20


class ArrayWriter:
    """Appends to `FOLDER/NAME.bin`.

    Plain writes, not a memory map: on a full disk a write raises OSError, where a store into a
    mapped page ends the process with SIGBUS.
    """

    def __init__(self, folder: Path, name: str, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        self._file = (folder / f"{name}.bin").open("wb", buffering=BUFFER_BYTES)

    def append(self, values: NDArray[Any]) -> None:
        """Appends `values`, converted to the type of the file. Raises OSError on a full disk."""
        data = np.ascontiguousarray(values, dtype=self.dtype)
        self._file.write(data.tobytes())
        self.length += len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):  # type: ignore[no-untyped-def]
        self._file.close()


def open_array(folder: Path, name: str, dtype: DTypeLike, length: int) -> NDArray[Any]:
    """`FOLDER/NAME.bin`, memory-mapped and read-only. Raises DataError if it is not `length` long."""
    path = folder / f"{name}.bin"
    expected = np.dtype(dtype).itemsize * length
    found = path.stat().st_size if path.exists() else -1
    if found != expected:
        state = "is missing" if found < 0 else f"has {found:,} bytes where {expected:,} were written"
        raise DataError(Problem("data.store", str(path), state, f"remove {folder} and prepare again"))
    if length == 0:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    # The base class: indexing an np.memmap makes an np.memmap each time, which is slow.
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(length,)))
