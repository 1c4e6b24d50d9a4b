"""Finds and reads the local files of a source, and provides the built-in corpus `stdlib`."""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llmtrain.data.cache import Cache, key_of
from llmtrain.data.sources.folders import files_of_split
from llmtrain.data.sources.formats import READERS, FileCorpus, Fingerprint, kind_of, stamp_of
from llmtrain.errors import DataError, Problem
from llmtrain.recipe import Source
from llmtrain.system.durable import fingerprint, write_atomically
from llmtrain.system.untrusted import UNREADABLE, expanded, read_json

STDLIB = "stdlib"
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders in the standard library that contain tests, or do not belong to it."""


def find_files(name: str, split: str, field: str) -> list[Path]:
    """Returns the sorted files that a path, folder or glob refers to; empty if nothing has that name.

    A folder stands for the data files of the split below it (`files_of_split`), which must be of one kind.

    Raises DataError for a folder or glob without data files, or with files of several kinds, and for a split that does
    not exist; files that are named directly are the split `train`.
    """
    path = expanded(name)
    if path.is_dir():
        return _of_one_kind(files_of_split(path, split, field), name, field)
    files = _named_files(path, name)
    if not files and not glob.has_magic(name):
        return []
    if split != "train":
        message = f"'{name}' names files, which have no split '{split}'"
        raise DataError(Problem("data.split", f"{field}.split", message, "leave `split` out, or name the folder"))
    return _of_one_kind(files, name, field)


def files_for_reader(name: str, split: str, field: str) -> list[Path]:
    """Returns the sorted files of any suffix that a path, folder or glob refers to, without hidden ones in a folder.

    Empty if nothing has that name. Raises DataError for a folder without files, and for a split.
    """
    path = expanded(name)
    if split != "train":
        message = f"'{split}' has no effect: a reader reads all files that `name` refers to"
        raise DataError(Problem("data.split", f"{field}.split", message, "leave it out, and name the files by a glob"))
    if not path.is_dir():
        return _named_files(path, name)
    parts = {file: file.relative_to(path).parts for file in sorted(path.rglob("*")) if file.is_file()}
    files = [file for file, names in parts.items() if not any(part.startswith(".") for part in names)]
    if not files:
        raise DataError(Problem("data.missing", f"{field}.name", f"'{name}' has no files"))
    return files


def _named_files(path: Path, name: str) -> list[Path]:
    """Returns the file of a path, or the files that match a glob. name: the path as it was given."""
    if path.is_file():
        return [path]
    matches = glob.glob(str(path), recursive=True) if glob.has_magic(name) else []  # noqa: PTH207 - absolute too
    return [match for match in map(Path, sorted(matches)) if match.is_file()]


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
    stamps = {str(path.absolute()): stamp_of(path) for path in files}
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
