"""Content-addressed folders: each is created once, under a lock, and is complete or absent."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from llmtrain.data.progress import Progress
from llmtrain.errors import DataError, Problem
from llmtrain.recipe import DataConfig
from llmtrain.system.durable import DISK_FULL, flush_tree, remove_tree, rename
from llmtrain.system.host import cache_root
from llmtrain.system.untrusted import UNREADABLE, expanded, file_fault, read_json

META = "meta.json"


def cache_folder(data: DataConfig) -> Path:
    """Returns `data.cache_dir`, else `$LLMTRAIN_CACHE`, else `~/.cache/llmtrain`."""
    folder = expanded(data.cache_dir) if data.cache_dir else cache_root()
    if folder.parts[0].startswith("~"):
        message = "this home directory is unknown"
        raise DataError(Problem("data.cache", str(folder), message, "set $HOME, $LLMTRAIN_CACHE or data.cache_dir"))
    return folder.absolute()


def key_of(*parts: Any) -> str:
    """Returns a name for content: the hash of its parts, which are JSON data."""
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


class NotPreparedError(Exception):
    """Something is missing from a cache that is opened read-only."""


@dataclass(frozen=True)
class Entry:
    """A finished folder of the cache."""

    path: Path
    meta: dict[str, Any]
    """The result of its builder."""
    made: bool
    """Whether this call created it; False if it existed or another process created it."""


class Cache:
    """Folders `KIND/KEY` below one folder, shared by any number of processes.

    read_only: raise NotPreparedError if something would have to be created, or hashed first.
    """

    def __init__(self, folder: Path, progress: Progress, *, read_only: bool = False) -> None:
        self.folder = folder
        self.progress = progress
        self.read_only = read_only

    def entry(self, kind: str, key: str, build: Callable[[Path], dict[str, Any]]) -> Entry:
        """Returns the entry of a key, created by `build(folder) -> meta` if it does not exist.

        `build` fills a temporary folder, which is renamed once everything in it has reached the disk: an entry that
        exists is complete. A process that needs an entry which another one is creating waits for it.

        Raises DataError if the folder cannot be written or the disk is full.
        """
        final = self.folder / kind / key
        if not (final / META).exists():
            self.require_writable(str(final))
            with self._writing(final.parent), self._lock(final):
                if not (final / META).exists():
                    self._sweep(final.parent, keep=final)
                    return Entry(final, self._make(final, build), made=True)
        return Entry(final, _meta_of(final / META), made=False)

    def require_writable(self, what: str) -> None:
        """Raises NotPreparedError if the cache is read-only."""
        if self.read_only:
            raise NotPreparedError(what)

    def _make(self, final: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        partial = final.with_name(final.name + ".partial")
        # Under the lock no other process writes here: existing files are left from a process that died.
        remove_tree(partial)
        partial.mkdir()
        try:
            meta = build(partial)
            (partial / META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
            flush_tree(partial)
            rename(partial, final)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise self._disk_full(partial) from None
        finally:
            remove_tree(partial)
        return meta

    def _disk_full(self, partial: Path) -> DataError:
        written = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        fraction = self.progress.fraction
        needed = f"about {int(written / fraction):,}" if fraction and fraction < 1 else f"over {written:,}"
        free = shutil.disk_usage(self.folder).free + written  # what is written so far will be removed
        message = f"the disk is full: one store needs {needed} bytes, {free:,} bytes are free; existing data are kept"
        return DataError(Problem("data.disk", str(self.folder), message, "free some space, or set data.cache_dir"))

    @contextmanager
    def _writing(self, folder: Path) -> Iterator[None]:
        """Creates a folder for entries, and converts errors of this and of writing in it to DataError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            if error.errno in DISK_FULL:
                raise self._disk_full(folder / "none") from None
            message = f"cannot be written: {error.strerror or error}"
            fix = "set data.cache_dir or $LLMTRAIN_CACHE to a writable folder"
            raise DataError(Problem("data.cache", str(self.folder), message, fix)) from error

    @contextmanager
    def _lock(self, final: Path) -> Iterator[None]:
        lock = FileLock(_lock_path(final))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self.progress.say(f"Another process is preparing {final}; waiting for it")
            lock.acquire()
        except NotImplementedError:  # raised by filelock for ENOSYS
            raise OSError(errno.ENOSYS, "its file system has no file locks") from None
        try:
            yield
        finally:
            lock.release()

    def _sweep(self, folder: Path, keep: Path) -> None:
        """Removes incomplete temporary folders whose lock is not held by any process."""
        for partial in folder.glob("*.partial"):
            final = partial.with_suffix("")
            if final != keep:
                with suppress(Timeout), FileLock(_lock_path(final), timeout=0):
                    remove_tree(partial)


def _meta_of(file: Path) -> dict[str, Any]:
    try:
        return read_json(file, dict[str, Any])
    except UNREADABLE as error:
        raise DataError(
            Problem(
                "data.cache",
                str(file),
                f"cannot be read: {file_fault(error)}",
                "delete its folder; it will be created again",
            )
        ) from None


def _lock_path(final: Path) -> Path:
    return final.with_name(final.name + ".lock")
