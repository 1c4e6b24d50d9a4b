"""Content-addressed folders: each made once, under a lock, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from llmtrain.data.progress import Progress
from llmtrain.durable import DISK_FULL, flush, flush_tree
from llmtrain.errors import DataError, Problem
from llmtrain.recipe import DataConfig
from llmtrain.untrusted import UNREADABLE, expanded, read_json, why

META = "meta.json"


def cache_folder(data: DataConfig) -> Path:
    """`data.cache_dir`, else `$LLMTRAIN_CACHE`, else `~/.cache/llmtrain`."""
    chosen = data.cache_dir or os.environ.get("LLMTRAIN_CACHE") or "~/.cache/llmtrain"
    folder = expanded(chosen)
    if folder.parts[0].startswith("~"):
        message = "nobody knows this home folder"
        raise DataError(Problem("data.cache", chosen, message, "set $HOME, $LLMTRAIN_CACHE or data.cache_dir"))
    return folder.absolute()


def key_of(*parts: Any) -> str:
    """A name for content: the hash of its parts, which are JSON data."""
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


class NotPreparedError(Exception):
    """Something is not in a cache that is only looked into."""


@dataclass(frozen=True)
class Entry:
    """A finished folder of the cache."""

    path: Path
    meta: dict[str, Any]
    """What its builder returned."""
    made: bool
    """Whether this call made it; False where it was there or another process made it."""


class Cache:
    """Folders `KIND/KEY` below one folder, which any number of processes share.

    read_only: only look; whatever would have to be made or hashed first raises NotPreparedError.
    """

    def __init__(self, folder: Path, progress: Progress, *, read_only: bool = False) -> None:
        self.folder = folder
        self.progress = progress
        self.read_only = read_only

    def entry(self, kind: str, key: str, build: Callable[[Path], dict[str, Any]]) -> Entry:
        """The entry of a key, made by `build(folder) -> meta` if it is not there.

        `build` fills a temporary folder, which is renamed once, after everything in it has
        reached the disk: an entry that exists is whole. Whoever asks for an entry that another
        process is making waits for it.

        Raises DataError where the folder cannot be written or the disk is full.
        """
        final = self.folder / kind / key
        if not (final / META).exists():
            self.require_making(str(final))
            with self._writing(final.parent), self._lock(final):
                if not (final / META).exists():
                    self._sweep(final.parent, keep=final)
                    return Entry(final, self._make(final, build), made=True)
        return Entry(final, _meta_of(final / META), made=False)

    def require_making(self, what: str) -> None:
        """Raises NotPreparedError in a cache that is only looked into."""
        if self.read_only:
            raise NotPreparedError(what)

    def _make(self, final: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        partial = _partial(final)
        # Under the lock nobody else writes here: what lies there is of a process that died.
        _remove(partial)
        partial.mkdir()
        try:
            meta = build(partial)
            (partial / META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
            flush_tree(partial)
            partial.rename(final)
            flush(final.parent)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise self._disk_full(partial) from None
        finally:
            _remove(partial)
        return meta

    def _disk_full(self, partial: Path) -> DataError:
        written = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        fraction = self.progress.fraction
        needed = f"about {_size(int(written / fraction))}" if fraction and fraction < 1 else f"over {_size(written)}"
        free = shutil.disk_usage(self.folder).free + written  # what is written now is removed
        message = f"the disk is full: {needed} needed for one store, {_size(free)} free; what was there before is kept"
        return DataError(Problem("data.disk", str(self.folder), message, "free some space, or set data.cache_dir"))

    @contextmanager
    def _writing(self, folder: Path) -> Iterator[None]:
        """Makes a folder for entries; says plainly where that, or writing in it, is not possible."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            if error.errno in DISK_FULL:
                raise self._disk_full(folder / "none") from None
            message = f"cannot be written: {error.strerror or error}"
            fix = "set data.cache_dir or $LLMTRAIN_CACHE to a folder that can"
            raise DataError(Problem("data.cache", str(self.folder), message, fix)) from error

    @contextmanager
    def _lock(self, final: Path) -> Iterator[None]:
        lock = FileLock(_lock_path(final))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self.progress.say(f"Another process is preparing {final}; waiting for it")
            lock.acquire()
        except NotImplementedError:  # what filelock makes of ENOSYS
            raise OSError(errno.ENOSYS, "its file system has no file locks") from None
        try:
            yield
        finally:
            lock.release()

    def _sweep(self, folder: Path, keep: Path) -> None:
        """Removes what died half-made: temporary folders whose lock nobody holds."""
        for partial in folder.glob("*.partial"):
            final = partial.with_suffix("")
            if final == keep:
                continue
            try:
                with FileLock(_lock_path(final), timeout=0):
                    _remove(partial)
            except Timeout:
                continue


def _meta_of(file: Path) -> dict[str, Any]:
    try:
        return read_json(file, dict[str, Any])
    except UNREADABLE as error:
        raise DataError(
            Problem("data.cache", str(file), f"cannot be read: {why(error)}", "delete its folder; it is made anew")
        ) from None


def _partial(final: Path) -> Path:
    return final.with_name(final.name + ".partial")


def _lock_path(final: Path) -> Path:
    return final.with_name(final.name + ".lock")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _size(count: int) -> str:
    return f"{count:,} bytes"
