"""Local corpora: which files a name means, what they hold, and the built-in corpus `stdlib`."""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from llmtrain.data.cache import Cache, key_of
from llmtrain.data.formats import READERS, Document, kind_of, read_text
from llmtrain.errors import DataError, Problem, nearest
from llmtrain.recipe import Source
from llmtrain.untrusted import UNREADABLE, expanded, open_regular, read_json

STDLIB = "stdlib"
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders of the standard library that hold tests, or are not of the library."""
READ_BYTES = 1 << 22


class Fingerprint(NamedTuple):
    """What a file is: its content, and what tells cheaply that it is still the same."""

    size: int
    """Bytes."""
    modified: int
    """Nanoseconds since the epoch."""
    hash: str


@dataclass(frozen=True)
class FileCorpus:
    """Documents of local files of one kind, in the order of their paths."""

    name: str
    kind: str
    """Suffix that says how the files are read."""
    column: str
    files: tuple[Path, ...]
    prints: tuple[Fingerprint, ...]
    """What each file was when it was hashed."""
    lenient: bool = False
    """Pass over a file that is not UTF-8 instead of refusing it."""

    @property
    def identity(self) -> str:
        """Names the content: equal documents in equal order, wherever the files lie."""
        column = self.column if READERS.get(self.kind, read_text) is not read_text else None
        return key_of("files", self.kind, column, [known.hash for known in self.prints], self.lenient)

    @property
    def is_one_document(self) -> bool:
        """A text file is one."""
        return len(self.files) == 1 and READERS.get(self.kind, read_text) is read_text

    def documents(self) -> Iterator[Document]:
        """The documents, with the share of the bytes read so far. Raises DataError for a file it cannot read."""
        reader = READERS.get(self.kind, read_text)
        total = max(1, sum(known.size for known in self.prints))
        done = 0
        for path, known in zip(self.files, self.prints, strict=True):
            try:
                for text, fraction in reader(path, self.column):
                    yield Document(text, (done + fraction * known.size) / total)
            except DataError as error:
                if not (self.lenient and error.problems[0].rule == "data.utf8"):
                    raise
            if _stamp(path) != (known.size, known.modified):
                # Its store would bear the name of what the file held before.
                raise DataError(Problem("data.changed", str(path), "changed while it was read", "run again"))
            done += known.size


def find_files(name: str, split: str, field: str) -> list[Path]:
    """The files that a path, folder or glob means, sorted; empty if nothing of that name is here.

    A folder stands for the data files below it, which must be of one kind. In a folder that
    `datasets` saved several splits to, it is the split's.

    Raises DataError for a folder or glob without data files, or with files of several kinds.
    """
    path = expanded(name)
    if path.is_file():
        return _of_one_kind([path], name, field)
    if path.is_dir():
        return _of_one_kind(_below(_split_folder(path, split, field)), name, field)
    if glob.has_magic(name):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207 - absolute too
        return _of_one_kind([match for match in matches if match.is_file()], name, field)
    return []


def file_corpus(source: Source, files: Sequence[Path], cache: Cache) -> FileCorpus:
    """The corpus of files that `find_files` found. Raises DataError for one that cannot be read."""
    kind = kind_of(files[0])
    assert kind is not None  # find_files returns no other
    prints = Fingerprints(cache, source.name).of(files)
    return FileCorpus(source.name, kind, source.text_column, tuple(files), prints)


def stdlib_corpus(cache: Cache) -> FileCorpus:
    """The source text of the running interpreter's standard library, without its tests: a file, a document."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_STDLIB]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    prints = Fingerprints(cache, STDLIB).of(files)
    return FileCorpus(STDLIB, ".py", "", tuple(files), prints, lenient=True)


class Fingerprints:
    """Content hashes of files, remembered by size and modification time so that each is read once."""

    def __init__(self, cache: Cache, name: str) -> None:
        self._cache = cache
        self._path = cache.folder / "fingerprints" / f"{key_of(os.path.abspath(name))}.json"  # noqa: PTH100 - globs

    def of(self, files: Sequence[Path]) -> tuple[Fingerprint, ...]:
        """The fingerprint of each file. Raises DataError for one that cannot be read."""
        known = self._known()
        stamps = {str(path.absolute()): _stamp(path) for path in files}
        found = {name: known[name] for name, stamp in stamps.items() if name in known and known[name][:2] == stamp}
        unknown = [name for name in stamps if name not in found]
        if unknown:
            self._cache.require_making(unknown[0])
            with self._cache.progress.task("Hashing the files") as task:
                for number, name in enumerate(unknown):
                    found[name] = Fingerprint(*stamps[name], _hash(Path(name)))
                    task.update(number / len(unknown), name)
            self._remember(found)
        return tuple(found[name] for name in stamps)

    def _known(self) -> dict[str, Fingerprint]:
        try:
            return read_json(self._path, dict[str, Fingerprint])
        except UNREADABLE:
            return {}

    def _remember(self, found: dict[str, Fingerprint]) -> None:
        # Nothing is lost where this cannot be written: the files are hashed again next time, and
        # a folder that cannot be written is reported by whoever has to write a store.
        partial = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_text(json.dumps(found), encoding="utf-8")
                partial.replace(self._path)
            finally:
                partial.unlink(missing_ok=True)


def _stamp(path: Path) -> tuple[int, int]:
    """Size and modification time of a file. Raises DataError if it is gone."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(Problem("data.read", str(path), f"cannot be read: {error.strerror}")) from error
    return status.st_size, status.st_mtime_ns


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    try:
        with open_regular(path) as file:
            while data := file.read(READ_BYTES):
                digest.update(data)
    except OSError as error:
        raise DataError(Problem("data.read", str(path), f"cannot be read: {error.strerror}")) from error
    return digest.hexdigest()


def _below(folder: Path) -> list[Path]:
    """The data files below a folder; hidden files and folders are left out, as shells do."""
    files = (path for path in folder.rglob("*") if path.is_file() and kind_of(path))
    return [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _split_folder(folder: Path, split: str, field: str) -> Path:
    """The folder of a split where `DatasetDict.save_to_disk` wrote one for each; else the folder itself."""
    index = folder / "dataset_dict.json"
    if not index.exists():
        return folder
    splits = _splits(index)
    if split in splits:
        return folder / split
    message = f"'{folder}' has no split '{split}'{nearest(split, splits)} (splits: {', '.join(splits)})"
    raise DataError(Problem("data.split", f"{field}.split", message))


def _splits(index: Path) -> list[str]:
    """The names of splits in a `dataset_dict.json`. Raises DataError for one that does not hold them."""
    try:
        return read_json(index, dict[str, list[str]])["splits"]
    except (*UNREADABLE, KeyError):
        reason = 'holds no {"splits": [NAME, ...]}'
    fix = "save the data set again (DatasetDict.save_to_disk), or name the folder of one split"
    raise DataError(Problem("data.format", str(index), reason, fix))


def _of_one_kind(files: list[Path], name: str, field: str) -> list[Path]:
    kinds: dict[str | None, int] = {}
    for path in files:
        kinds[kind_of(path)] = kinds.get(kind_of(path), 0) + 1
    readable = f"{', '.join(READERS)}; the first three also as .gz or .zst"
    if not files:
        message = f"'{name}' has no data files ({readable})"
        raise DataError(Problem("data.missing", f"{field}.name", message))
    if None in kinds:
        stranger = next(path for path in files if kind_of(path) is None)
        raise DataError(Problem("data.format", f"{field}.name", f"'{stranger}' is not of a known kind ({readable})"))
    if len(kinds) > 1:
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=str))
        message = f"'{name}' has files of several kinds ({found})"
        raise DataError(Problem("data.mixed", f"{field}.name", message, "name one kind by a glob: FOLDER/**/*.jsonl"))
    return sorted(files)
