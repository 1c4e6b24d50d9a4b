"""Flat arrays on disk: appended to while they are built, memory-mapped and compared with their hashes afterwards."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from llmtrain.errors import DataError, Problem

BUFFER_BYTES = 1 << 20
CHUNK_BYTES = 4096
"""Bytes with a hash of their own: a page, so that what is compared has been read anyway."""
COMPARED_BYTES = 1 << 22
HASHES = ".xxh3"
"""Suffix of the file with the hashes of the chunks of an array, 8 bytes each."""
ADVICE_PAGES = (128 << 10) // mmap.PAGESIZE
"""Pages per call of madvise: Linux reads no more than the device's readahead, which is 128 KiB by default."""


class ArrayWriter:
    """Appends to `FOLDER/NAME.bin`, and the hash of each chunk of it to `FOLDER/NAME.xxh3`.

    Uses plain writes and not a memory map: on a full disk a write raises OSError, while a store into a mapped page
    kills the process with SIGBUS.
    """

    def __init__(self, folder: Path, name: str, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        path = folder / f"{name}.bin"
        self._file = path.open("wb", buffering=BUFFER_BYTES)
        self._hashes = path.with_suffix(HASHES).open("wb", buffering=BUFFER_BYTES)
        self._rest = b""
        """The bytes after the last whole chunk."""

    def append(self, values: NDArray[Any]) -> None:
        """Appends `values`, converted to the data type of the file. Raises OSError on a full disk."""
        data = np.ascontiguousarray(values, dtype=self.dtype).tobytes()
        self._file.write(data)
        self.length += len(values)
        data = self._rest + data
        whole = len(data) // CHUNK_BYTES * CHUNK_BYTES
        self._hashes.write(chunk_hashes(data[:whole]).tobytes())
        self._rest = data[whole:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file, self._hashes:
            self._hashes.write(chunk_hashes(self._rest).tobytes())


def chunk_hashes(data: bytes | memoryview) -> NDArray[np.uint64]:
    """Returns the hash of each chunk of `CHUNK_BYTES`, [chunks]. The last chunk may be shorter."""
    view = memoryview(data)
    chunks = (view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES))
    return np.fromiter(map(xxhash.xxh3_64_intdigest, chunks), np.uint64)


class _HashedMap(mmap.mmap):
    """A memory map that knows the hashes of its file."""

    path: Path
    hashes: NDArray[np.uint64] | None = None
    """[chunks]; None for a file of hashes."""
    intact: NDArray[np.bool_]
    """[chunks]: whether a chunk has been read and has its hash."""


def open_array(folder: Path, name: str, dtype: DTypeLike, length: int) -> NDArray[Any]:
    """Memory-maps `FOLDER/NAME.bin` read-only. Raises DataError if it does not have `length` items."""
    path = folder / f"{name}.bin"
    size = np.dtype(dtype).itemsize * length
    mapped = _map_file(path, size)
    if mapped is None:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    chunks = -(-size // CHUNK_BYTES)
    mapped.hashes = np.frombuffer(_map_file(path.with_suffix(HASHES), chunks * 8) or b"", np.uint64)
    mapped.intact = np.zeros(chunks, np.bool_)
    # Not an np.memmap: indexing one makes an np.memmap each time, which is slow.
    return np.frombuffer(mapped, dtype)


def _map_file(path: Path, expected: int) -> _HashedMap | None:
    """Maps a file of a size in bytes; None if this is 0. Raises DataError for another size."""
    size = path.stat().st_size if path.exists() else -1
    if size != expected:
        state = "is missing" if size < 0 else f"has {size:,} bytes, but {expected:,} were written"
        raise _damaged(path, state)
    if not expected:
        return None
    with path.open("rb") as file:
        mapped = _HashedMap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.path = path
    return mapped


def _damaged(path: Path, state: str) -> DataError:
    return DataError(Problem("data.store", str(path), state, f"remove {path.parent} and prepare again"))


def require_intact(array: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Compares the ranges starts[i] to ends[i] (items) of an array that `open_array` opened with their hashes.

    Each chunk is compared once, when it is first needed: this reads no other page than the caller does, and costs
    little beside reading. Does nothing for other arrays.

    Raises DataError for a chunk that is not as it was written.
    """
    mapped = _map_of(array)
    if mapped is None or mapped.hashes is None or not len(starts):
        return
    first = starts * array.itemsize // CHUNK_BYTES
    chunks = concatenated_ranges(first, np.maximum((ends * array.itemsize - 1) // CHUNK_BYTES + 1 - first, 0))
    unknown = chunks[~mapped.intact[chunks]]
    if not unknown.size:
        return
    with memoryview(mapped) as view:
        for chunk, expected in dict(zip(unknown.tolist(), mapped.hashes[unknown].tolist(), strict=True)).items():
            start, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, len(view))
            if xxhash.xxh3_64_intdigest(view[start:end]) != expected:
                raise _damaged(mapped.path, f"the bytes {start:,} to {end:,} are not those that were written")
    mapped.intact[unknown] = True


def require_all_intact(array: NDArray[Any]) -> None:
    """Does the same as `require_intact` for a whole array."""
    require_intact(array, np.array([0]), np.array([len(array)]))


def compare(folder: Path, on_read: Callable[[int], None]) -> list[Problem]:
    """Compares all arrays in a folder with their hashes, and returns the faults, at most one for each.

    on_read: called with the number of bytes of each part that has been read.
    """
    problems: list[Problem] = []
    for path in sorted(folder.glob("*.bin")):
        try:
            array = open_array(folder, path.stem, np.uint8, path.stat().st_size)
            for start in range(0, len(array), COMPARED_BYTES):
                end = min(start + COMPARED_BYTES, len(array))
                require_intact(array, np.array([start]), np.array([end]))
                on_read(end - start)
        except DataError as error:
            problems += error.problems
    return problems


def concatenated_ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the ranges start, start + 1, ... of the given lengths, concatenated: [sum of lengths]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def prefetch_ranges(array: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Starts reading the ranges starts[i] to ends[i] (items, none empty) of an array from disk, without waiting.

    All ranges are read in parallel, and nothing else. Other pages are read one after another when they are touched,
    each with the disk's readahead: often megabytes for a sequence of 4 KiB. Does nothing for ranges in memory, and for
    arrays that `open_array` has not opened.
    """
    mapped = _map_of(array)
    if mapped is None or not len(starts):
        return
    if mapped.hashes is not None:
        chunks = starts * array.itemsize // CHUNK_BYTES
        unknown = ~mapped.intact[chunks]
        prefetch_ranges(mapped.hashes, chunks[unknown], (ends[unknown] * array.itemsize - 1) // CHUNK_BYTES + 1)
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


def disable_readahead(array: NDArray[Any]) -> None:
    """Disables readahead for an array that `open_array` opened, for searches across all of it."""
    mapped = _map_of(array)
    if mapped is not None:
        mapped.madvise(mmap.MADV_RANDOM)


def _map_of(array: NDArray[Any]) -> _HashedMap | None:
    """Returns the memory map of a whole array of `open_array`, or None for parts of it and for other arrays."""
    mapped = getattr(array.base, "obj", None)
    return mapped if isinstance(mapped, _HashedMap) else None
