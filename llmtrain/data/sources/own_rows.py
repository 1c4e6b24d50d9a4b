"""Rows that a user's own functions read, filter and map, and rows with numbers for a user's own loss.

Helper processes (`own_rows_process.py`) import and call the functions, as this process never does. One of them reads;
as many as there are cores filter and map, while this process tokenizes.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.data.cache import Cache, key_of
from llmtrain.data.sources import own_rows_process
from llmtrain.data.sources.columns import values_of
from llmtrain.data.sources.files import files_for_reader, fingerprints
from llmtrain.data.sources.formats import AS_JSON, Document, FileCorpus, Fingerprint, check_unchanged, from_row
from llmtrain.data.sources.hub import HubCorpus
from llmtrain.data.sources.own_rows_process import (
    BATCH_CHARACTERS,
    BATCH_ROWS,
    CHECKED_ROWS,
    FAULTY,
    FILTERED,
    KEPT,
    TEXT,
)
from llmtrain.data.sources.stdlib_chat import StdlibChat
from llmtrain.errors import DataError, Problem, RecipeError
from llmtrain.plan.facts.helper_process import HelperProcess
from llmtrain.plan.facts.own_code import examined_objects
from llmtrain.recipe import Source
from llmtrain.system.host import available_cores

FORMAT = 1
"""Version of what is read from rows; part of a store's key."""
MAX_SHOWN = 5
"""Number of faulty rows that an error message shows."""


@dataclass(frozen=True)
class RowCode:
    """The functions of a source, and what happens to rows for which they fail."""

    functions: dict[str, str]
    """Field of the source → import path."""
    folder: str | None
    """Folder of the recipe's own modules (`Recipe.code_dir`)."""
    field: str
    """Recipe field of the source."""
    drops_faulty: bool
    """Whether rows for which a function fails are left out (`data.faulty_rows`); otherwise they are refused."""

    @property
    def identity(self) -> list[Any]:
        """Identifies the functions: their paths, the content of the user's files, and the versions of packages."""
        if not self.functions:
            return [FORMAT, self.drops_faulty]
        objects = {f"{self.field}.{name}": path for name, path in self.functions.items()}
        code = examined_objects(objects, self.folder)
        return [FORMAT, self.functions, sorted(code.files.values()), code.packages, self.drops_faulty]

    @contextmanager
    def process(self, names: Sequence[str], is_first: bool = True) -> Iterator[HelperProcess]:
        """Starts a process for the functions of some fields. is_first: whether it tries its first rows twice."""
        functions = {name: self.functions[name] for name in names if name in self.functions}
        what = f"the process that runs {' and '.join(functions.values())} ({self.field})"
        with _data_errors(), HelperProcess(own_rows_process.__name__, what) as process:
            process.send({"functions": functions, "folder": self.folder, "field": self.field, "is_first": is_first})
            yield process


@contextmanager
def _data_errors() -> Iterator[None]:
    try:
        yield
    except RecipeError as error:
        raise DataError(error.problems) from None


@dataclass
class RowCounts:
    """What became of rows in the last pass over them."""

    read: int = 0
    filtered: int = 0
    """Number of rows that `filter` dropped."""
    changed: int = 0
    """Number of rows that `map` replaced by one or several others."""
    removed: int = 0
    """Number of rows for which `map` returned none."""
    added: int = 0
    """Number of rows that `map` returned beyond the first one of each row."""
    faulty: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = {"changed": self.changed, "left out": self.removed, "added": self.added}
        mapped = ", ".join(f"{count:,} {what}" for what, count in parts.items() if count)
        dropped = f"{self.filtered:,} dropped by `filter`"
        faulty = f"{self.faulty:,} faulty left out, such as {self.faults[0]}" if self.faults else ""
        by_map = mapped and f"{mapped} by `map`"
        whole = ", ".join(filter(None, (dropped if self.filtered else "", by_map, faulty)))
        return f"{self.read:,} rows read, {whole or 'none dropped or changed'}"

    def clear(self) -> None:
        """Begins another pass."""
        vars(self).update(asdict(RowCounts()))

    def fault(self, place: str, message: str) -> None:
        """Counts a faulty row."""
        self.faulty += 1
        if len(self.faults) < MAX_SHOWN:
            self.faults.append(f"{place}: {message}")


@dataclass(frozen=True)
class ReaderCorpus:
    """Rows that a user's own reader yields."""

    name: str
    code: RowCode
    files: tuple[Path, ...]
    """The files that it reads; it gets the source's name if there are none."""
    prints: tuple[Fingerprint, ...]
    is_one_document: bool = False

    @property
    def identity(self) -> str:
        """Identifies the content: that of the files, or the name."""
        return key_of("reader", [stored.hash for stored in self.prints] if self.files else self.name)

    def documents(self) -> Iterator[Document]:
        """Yields the rows. Raises DataError if the reader fails, or does not repeat its first rows."""
        total = max(1, sum(stored.size for stored in self.prints))
        done = 0
        with self.code.process(["reader"]) as process:
            for number, name in enumerate(map(str, self.files or [self.name])):
                size = self.prints[number].size if self.files else 0
                row_number = 0
                process.send(name)
                while (answer := process.receive()) is not None:
                    if isinstance(answer, str):
                        raise DataError(Problem("data.reader", f"{self.code.field}.reader", answer))
                    for row in answer:
                        row_number += 1
                        yield from from_row(row, f"{name}, row {row_number}", None, done / total)
                if self.files:
                    check_unchanged(self.files[number], self.prints[number])
                done += size


def reader_corpus(source: Source, code: RowCode, cache: Cache) -> ReaderCorpus:
    """Returns what the reader of a source reads. Raises DataError for an unreadable file, or a folder without files."""
    files = files_for_reader(source.name, source.split, code.field)
    return ReaderCorpus(source.name, code, tuple(files), fingerprints(cache, source.name, files) if files else ())


@dataclass(frozen=True)
class OwnRows:
    """The documents of rows that are read whole: a user's own functions may filter and map them, and a user's own loss
    may be given their numbers."""

    rows: FileCorpus | HubCorpus | StdlibChat | ReaderCorpus
    """Read whole, without choosing a column."""
    code: RowCode
    column: str | None
    """Column of the text; None to keep whole rows."""
    loss_columns: tuple[str, ...] = ()
    """Columns of numbers that a user's own loss is given (`objective.columns`)."""
    counts: RowCounts = field(default_factory=RowCounts, compare=False)
    """Of the last pass."""
    is_one_document: bool = False

    @property
    def name(self) -> str:
        """The name in the recipe."""
        return self.rows.name

    @property
    def identity(self) -> str:
        """Identifies the content, the functions, and the columns that the loss is given."""
        columns = [list(self.loss_columns)] if self.loss_columns else []
        return key_of("own rows", self.rows.identity, *self.code.identity, self.column, *columns)

    def documents(self) -> Iterator[Document]:
        """Yields the documents. Raises DataError for rows without the columns, and for faulty rows."""
        self.counts.clear()
        names = [name for name in ("filter", "map") if name in self.code.functions]
        for document, rows in self._processed(names) if names else ((document, None) for document in self._read()):
            if rows is None and self.column is None and not self.loss_columns:
                yield document
                continue
            where = f", after {self.code.functions['map']}" if rows is not None else ""
            for row in [document.row or json.loads(document.text)] if rows is None else rows:
                for own in self._with_values(row, document.place + where, document.fraction):
                    yield own._replace(folder=document.folder)

    def _with_values(self, row: dict[str, Any], place: str, fraction: float) -> Iterator[Document]:
        """Yields the document of a row, with the numbers for the loss; nothing for a null text or a dropped row."""
        # Every cell of such a file is a text.
        of_texts = isinstance(self.rows, FileCorpus) and self.rows.kind in (".csv", ".tsv")
        for document in from_row(row, place, self.column, fraction):
            try:
                yield document._replace(values=values_of(row, self.loss_columns, place, of_texts))
            except DataError as error:
                if not self.code.drops_faulty:
                    raise
                self.counts.fault(place, error.problems[0].message)

    def _read(self) -> Iterator[Document]:
        """Yields the rows, each of which has its JSON as text."""
        for document in self.rows.documents():
            self.counts.read += 1
            if isinstance(self.rows, FileCorpus) and self.rows.has_texts:
                row = {TEXT: document.text}
                document = document._replace(text=AS_JSON.encode(row), row=row)
            yield document

    def _processed(self, names: Sequence[str]) -> Iterator[tuple[Document, list[dict[str, Any]] | None]]:
        """Yields the rows that are kept, each with the rows that replace it; None if it does not change.

        Each batch goes to the next process, whose answers to the one before were received: all of them work at once.
        """
        waiting: deque[tuple[HelperProcess, list[Document]]] = deque()
        processes: list[HelperProcess] = []
        most = available_cores()
        with ExitStack() as stack:
            for number, batch in enumerate(_batches(self._read())):
                if len(processes) < most:
                    processes.append(stack.enter_context(self.code.process(names, is_first=not number)))
                if len(waiting) == most:
                    yield from self._answered(*waiting.popleft())
                process = processes[number % most]
                process.send([(document.place, document.text) for document in batch])
                waiting.append((process, batch))
                if not number:  # no other process starts before the first rows were tried
                    yield from self._answered(*waiting.popleft())
            while waiting:
                yield from self._answered(*waiting.popleft())

    def _answered(
        self, process: HelperProcess, batch: list[Document]
    ) -> Iterator[tuple[Document, list[dict[str, Any]] | None]]:
        counts = self.counts
        for document, (verdict, result) in zip(batch, process.receive(), strict=True):
            if verdict == KEPT:
                yield document, None
            elif verdict == FILTERED:
                counts.filtered += 1
            elif verdict == FAULTY:
                counts.fault(document.place, result)
            else:
                counts.changed += bool(result)
                counts.removed += not result
                counts.added += max(0, len(result) - 1)
                yield document, result
        if counts.faulty and not self.code.drops_faulty:
            lines = "".join(f"\n    {fault}" for fault in counts.faults)
            more = f"\n    and {counts.faulty - MAX_SHOWN:,} more" if counts.faulty > MAX_SHOWN else ""
            message = f"{counts.faulty:,} of the first {counts.read:,} rows of '{self.name}' fail:{lines}{more}"
            fix = "--set data.faulty_rows=drop leaves such rows out"
            raise DataError(Problem("data.rows", self.code.field, message, fix))


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Yields the documents in lists of bounded size; the first is short, since it is tried twice."""
    batch: list[Document] = []
    characters, most = 0, CHECKED_ROWS
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= most or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters, most = [], 0, BATCH_ROWS
    if batch:
        yield batch
