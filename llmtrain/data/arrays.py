"""Flat arrays on disk: appended to while they are built, memory-mapped afterwards."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llmtrain.errors import DataError, Problem

BUFFER_BYTES = 1 << 20
ADVICE_PAGES = (128 << 10) // mmap.PAGESIZE
"""Pages per call of madvise: Linux reads no more than the device's readahead, which is 128 KiB by default."""


class ArrayWriter:
    """Appends to `FOLDER/NAME.bin`.

    Uses plain writes and not a memory map: on a full disk a write raises OSError, while a store into a mapped page
    kills the process with SIGBUS.
    """

    def __init__(self, folder: Path, name: str, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        self._file = (folder / f"{name}.bin").open("wb", buffering=BUFFER_BYTES)

    def append(self, values: NDArray[Any]) -> None:
        """Appends `values`, converted to the data type of the file. Raises OSError on a full disk."""
        data = np.ascontiguousarray(values, dtype=self.dtype)
        self._file.write(data.tobytes())
        self.length += len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def open_array(folder: Path, name: str, dtype: DTypeLike, length: int) -> NDArray[Any]:
    """Memory-maps `FOLDER/NAME.bin` read-only. Raises DataError if it does not have `length` items."""
    path = folder / f"{name}.bin"
    expected = np.dtype(dtype).itemsize * length
    found = path.stat().st_size if path.exists() else -1
    if found != expected:
        state = "is missing" if found < 0 else f"has {found:,} bytes, but {expected:,} were written"
        raise DataError(Problem("data.store", str(path), state, f"remove {folder} and prepare again"))
    if length == 0:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    with path.open("rb") as file:
        # Not an np.memmap: indexing one makes an np.memmap each time, which is slow.
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


def will_need(array: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Starts reading the ranges starts[i] to ends[i] (items, none empty) of an array from disk, without waiting.

    All ranges are read in parallel, and nothing else. Other pages are read one after another when they are touched,
    each with the disk's readahead: often megabytes for a sequence of 4 KiB. Does nothing for ranges in memory, and for
    arrays that `open_array` has not opened.
    """
    mapped = _mapping(array)
    if mapped is None or not len(starts):
        return
    first, end = starts * array.itemsize // mmap.PAGESIZE, (ends * array.itemsize - 1) // mmap.PAGESIZE + 1
    order = np.argsort(first, kind="stable")
    first, end = first[order], np.maximum.accumulate(end[order])
    # Adjacent ranges are advised together. A new group begins where a page is left out.
    begins = np.ones(len(first) + 1, bool)
    begins[1:-1] = first[1:] > end[:-1]
    for begin, stop in zip(first[begins[:-1]].tolist(), end[begins[1:]].tolist(), strict=True):
        for page in range(begin, stop, ADVICE_PAGES):
            size = min(ADVICE_PAGES, stop - page) * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, page * mmap.PAGESIZE, size)


def will_search(array: NDArray[Any]) -> None:
    """Disables readahead for an array that `open_array` opened, for searches across all of it."""
    mapped = _mapping(array)
    if mapped is not None:
        mapped.madvise(mmap.MADV_RANDOM)


def _mapping(array: NDArray[Any]) -> mmap.mmap | None:
    """Returns the memory map of a whole array of `open_array`, or None for parts of it and for other arrays."""
    mapped = getattr(array.base, "obj", None)
    return mapped if isinstance(mapped, mmap.mmap) else None
