"""Finds and reads the local files of a source, and provides the built-in corpus `stdlib`."""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llmtrain.data.cache import Cache, key_of
from llmtrain.data.sources.folders import files_of_split
from llmtrain.data.sources.formats import READERS, Document, kind_of, read_document
from llmtrain.errors import DataError, Problem
from llmtrain.recipe import Source
from llmtrain.system.durable import fingerprint, write_atomically
from llmtrain.system.untrusted import UNREADABLE, expanded, read_json

STDLIB = "stdlib"
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders in the standard library that contain tests, or do not belong to it."""


class Fingerprint(NamedTuple):
    """A hash of a file's content, with attributes by which a change is noticed without reading the file."""

    size: int
    """Size in bytes."""
    modified: int
    """Modification time in nanoseconds since the epoch."""
    hash: str


@dataclass(frozen=True)
class FileCorpus:
    """Documents of local files of one kind, in the order of their paths."""

    name: str
    kind: str
    """Suffix that determines how the files are read."""
    column: str | None
    """Column of the text; None to read whole rows."""
    files: tuple[Path, ...]
    prints: tuple[Fingerprint, ...]
    """The fingerprint of each file at the time it was hashed."""
    lenient: bool = False
    """Whether to skip a file that is not UTF-8 instead of refusing it."""

    @property
    def identity(self) -> str:
        """Identifies the content: the same for equal documents in the same order, wherever the files are."""
        column = self.column if READERS.get(self.kind, read_document) is not read_document else None
        return key_of("files", self.kind, column, [stored.hash for stored in self.prints], self.lenient)

    @property
    def is_one_document(self) -> bool:
        """Whether the corpus is a single text file."""
        return len(self.files) == 1 and READERS.get(self.kind, read_document) is read_document

    def documents(self) -> Iterator[Document]:
        """Yields the documents with the fraction of bytes read. Raises DataError for an unreadable file."""
        reader = READERS.get(self.kind, read_document)
        total = max(1, sum(stored.size for stored in self.prints))
        done = 0
        for path, stored in zip(self.files, self.prints, strict=True):
            try:
                for document in reader(path, self.column):
                    yield document._replace(fraction=(done + document.fraction * stored.size) / total)
            except DataError as error:
                if not (self.lenient and error.problems[0].rule == "data.utf8"):
                    raise
            if _stamp(path) != (stored.size, stored.modified):
                # The token store would otherwise be saved under the identity of the old content.
                raise DataError(Problem("data.changed", str(path), "changed while it was read", "run again"))
            done += stored.size


def find_files(name: str, split: str, field: str) -> list[Path]:
    """Returns the sorted files that a path, folder or glob refers to; empty if nothing has that name.

    A folder stands for the data files of the split below it (`files_of_split`), which must be of one kind.

    Raises DataError for a folder or glob without data files, or with files of several kinds, and for a split that does
    not exist; files that are named directly are the split `train`.
    """
    path = expanded(name)
    if path.is_dir():
        return _of_one_kind(files_of_split(path, split, field), name, field)
    if path.is_file():
        files = [path]
    elif glob.has_magic(name):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207 - absolute too
        files = [match for match in matches if match.is_file()]
    else:
        return []
    if split != "train":
        message = f"'{name}' names files, which have no split '{split}'"
        raise DataError(Problem("data.split", f"{field}.split", message, "leave `split` out, or name the folder"))
    return _of_one_kind(files, name, field)


def file_corpus(source: Source, files: Sequence[Path], cache: Cache, column: str | None) -> FileCorpus:
    """Returns the corpus of files that `find_files` found. Raises DataError for an unreadable file."""
    kind = kind_of(files[0])
    assert kind is not None  # find_files returns no other files
    prints = fingerprints(cache, source.name, files)
    return FileCorpus(source.name, kind, column, tuple(files), prints)


def stdlib_folder() -> Path:
    """Returns the folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_corpus(cache: Cache) -> FileCorpus:
    """Returns the source code of this Python's standard library, without its tests; each file is a document."""
    root = stdlib_folder()
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_STDLIB]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    prints = fingerprints(cache, STDLIB, files)
    return FileCorpus(STDLIB, ".py", "", tuple(files), prints, lenient=True)


def fingerprints(cache: Cache, source: str, files: Sequence[Path]) -> tuple[Fingerprint, ...]:
    """Returns the fingerprint of each file. Raises DataError for an unreadable file.

    They are cached, under the name of the source, by size and modification time, so that each file is read once.
    """
    store = cache.folder / "fingerprints" / f"{key_of(os.path.abspath(source))}.json"  # noqa: PTH100 - globs
    try:
        cached = read_json(store, dict[str, Fingerprint])
    except UNREADABLE:
        cached = {}
    stamps = {str(path.absolute()): _stamp(path) for path in files}
    prints = {name: cached[name] for name, stamp in stamps.items() if name in cached and cached[name][:2] == stamp}
    unknown = [name for name in stamps if name not in prints]
    if unknown:
        cache.require_writable(unknown[0])
        with cache.progress.task("Hashing the files") as task:
            for number, name in enumerate(unknown):
                prints[name] = Fingerprint(*stamps[name], _hash(Path(name)))
                task.update(number / len(unknown), name)
        # A failure loses nothing: the files are hashed again next time, and an unwritable folder is reported when a
        # store is written.
        with suppress(OSError):
            store.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(store, json.dumps(prints))
    return tuple(prints[name] for name in stamps)


def _stamp(path: Path) -> tuple[int, int]:
    """Returns size and modification time of a file. Raises DataError if it does not exist."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(Problem("data.read", str(path), f"cannot be read: {error.strerror}")) from error
    return status.st_size, status.st_mtime_ns


def _hash(path: Path) -> str:
    try:
        return fingerprint(path).xxh3_128
    except OSError as error:
        raise DataError(Problem("data.read", str(path), f"cannot be read: {error.strerror}")) from error


def _of_one_kind(files: list[Path], name: str, field: str) -> list[Path]:
    kinds = Counter(map(kind_of, files))
    readable = f"{', '.join(READERS)}; all but the last two also as .gz or .zst"
    if not files:
        message = f"'{name}' has no data files ({readable})"
        raise DataError(Problem("data.missing", f"{field}.name", message))
    if None in kinds:
        unreadable = next(path for path in files if kind_of(path) is None)
        message = f"'{unreadable}' has an unknown format ({readable})"
        raise DataError(Problem("data.format", f"{field}.name", message, "convert it to .jsonl or .parquet"))
    if len(kinds) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=str))
        message = f"'{name}' has files of several kinds ({counts})"
        raise DataError(Problem("data.mixed", f"{field}.name", message, "name one kind with a glob: FOLDER/**/*.jsonl"))
    return sorted(files)
