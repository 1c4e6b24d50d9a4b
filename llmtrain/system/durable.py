"""Files that are complete after a crash at any instant, and on disk when we say so.

Everything that a checkpoint does to the file system uses this module.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import xxhash

from llmtrain.system.untrusted import open_regular, require_regular

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NEW_FILE = 0o666
"""Permissions of a new file, restricted by the user's umask."""
BUFFER_BYTES = 1 << 20
"""Small writes are gathered up to this size, and files are read in chunks of it."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to an OSError: errors of a write or a flush have none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@dataclass(frozen=True)
class FileHash:
    """Size and hash of a file as it was written."""

    bytes: int
    xxh3_128: str
    """Hexadecimal. Detects damage at the speed of memory; it does not protect against a malicious change."""


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file such that a reader, or a crash at any instant, sees the old text or the new one.

    Raises OSError for anything that is not a regular file: a link, a device or a FIFO would itself be replaced.
    """
    with suppress(FileNotFoundError):
        require_regular(path.lstat(), path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, NEW_FILE)
    try:
        with naming(path), os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)


@contextmanager
def create(path: Path) -> Iterator[DurableFile]:
    """Creates a file, which is on disk and has its `fingerprint` when the context ends.

    Raises OSError, but not before the context ends: a serializer in the middle of a file cannot always be interrupted,
    so data after a failed write are dropped.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with DurableFile(path) as raw:
        yield raw
        raw.finish()


class DurableFile(io.RawIOBase):
    """A file for writing that hashes its content, and keeps its first error until `finish`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._hash = xxhash.xxh3_128()
        self._bytes = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, NEW_FILE)
        self.stream: BinaryIO = io.BufferedWriter(self, BUFFER_BYTES)
        """The stream to write to, which gathers small writes."""

    @property
    def fingerprint(self) -> FileHash:
        """The fingerprint of what was written so far."""
        return FileHash(self._bytes, self._hash.hexdigest())

    def writable(self) -> bool:
        """Returns True, since it is for writing."""
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Writes all of `data`; returns its number of bytes."""
        view = memoryview(data).cast("B")
        try:
            left = view
            while left and self.error is None:
                if not (done := os.write(self._descriptor, left)):  # as some file systems report a full disk
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                self._hash.update(left[:done])
                self._bytes += done
                left = left[done:]
        except OSError as error:
            self.error = error
        return len(view)

    def finish(self) -> None:
        """Waits until the file is on disk. Raises OSError if any write has failed."""
        with naming(self.path):
            self.stream.flush()
            if self.error is not None:
                raise self.error
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file as it is."""
        if not self.closed:
            super().close()
            os.close(self._descriptor)
            self._descriptor = -1


def open_log(path: Path) -> int:
    """Opens a regular file for appending and returns its descriptor. Raises OSError for anything else; never blocks."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, NEW_FILE)
    try:
        require_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def fingerprint(path: Path) -> FileHash:
    """Computes the fingerprint of a file on disk, which is read once. Raises OSError."""
    digest, length = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with open_regular(path) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            length += count
    return FileHash(length, digest.hexdigest())


def flush(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flushes everything below a folder, then the folder."""
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


def flush_folders(folder: Path, files: Iterable[str]) -> None:
    """Flushes the folders on the paths from `folder` to the files, which are given relative to it."""
    parents = {parent for file in files for parent in Path(file).parents}
    for parent in sorted(parents, key=lambda path: len(path.parts), reverse=True):
        flush(folder / parent)


def rename(old: Path, new: Path) -> None:
    """Renames within a folder; on disk when it returns. `new` must not exist."""
    old.rename(new)
    flush(new.parent)


def remove_tree(folder: Path) -> None:
    """Deletes a folder with its content, or what is in its place, if it exists."""
    with suppress(FileNotFoundError):
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink()
