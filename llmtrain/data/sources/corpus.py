"""Turns a `Source` of a recipe into documents, with an identifier of their content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import xxhash

from llmtrain.data.cache import Cache, key_of
from llmtrain.data.chat.conversation import ChatSource, RowError, find_layout
from llmtrain.data.sources.files import STDLIB, file_corpus, find_files, stdlib_corpus
from llmtrain.data.sources.formats import COMPRESSIONS, READERS, Document, FileCorpus
from llmtrain.data.sources.hub import HubCorpus, hub_corpus
from llmtrain.data.sources.own_rows import OwnRows, ReaderCorpus, RowCode, RowCounts, reader_corpus
from llmtrain.data.sources.stdlib_chat import STDLIB_CHAT, StdlibChat
from llmtrain.errors import DataError, Problem
from llmtrain.recipe import Source
from llmtrain.system.untrusted import expanded

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""Matches NAME or OWNER/NAME."""
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")
WORD_START = re.compile(r"(?<=\S)(?= \S)")


class Corpus(Protocol):
    """Documents in a fixed order."""

    @property
    def name(self) -> str:
        """The name in the recipe."""

    @property
    def identity(self) -> str:
        """Identifies the content: the same for equal documents that are read in the same order and the same way."""

    @property
    def is_one_document(self) -> bool:
        """Whether the corpus is known to be a single document without reading it."""

    def documents(self) -> Iterator[Document]:
        """Yields the documents from the beginning. Raises DataError if they cannot be read."""


@dataclass(frozen=True)
class ConversationCorpus:
    """A corpus whose documents are rows that hold conversations, as JSON objects."""

    rows: Corpus
    chat: ChatSource
    is_one_document: bool = False

    @property
    def name(self) -> str:
        """The name in the recipe."""
        return self.rows.name

    @property
    def identity(self) -> str:
        """Identifies the content, and the columns that hold the conversations."""
        chat = self.chat
        ignored = [list(chat.ignored)] if chat.ignored else []
        return key_of("conversations", self.rows.identity, chat.format, chat.columns, chat.system, *ignored)

    def documents(self) -> Iterator[Document]:
        """Yields the rows."""
        yield from self.rows.documents()

    def text_of(self, row: str) -> str:
        """Returns the texts of the messages of a JSON row; an empty text if the row holds no conversation."""
        values = json.loads(row)
        try:
            return "\n".join(conversation.text() for conversation in self.chat.layout(values, "").read(values))
        except (RowError, DataError):
            return ""


class CorpusPart(NamedTuple):
    """A document with its split, or the part of a single document that belongs to one split."""

    text: str
    fraction: float
    """Fraction of the corpus that has been read, including this part."""
    is_held_out: bool
    values: tuple[float, ...] = ()
    """As in `Document`."""


def open_corpora(
    sources: Sequence[Source],
    cache: Cache,
    field: str = "data.sources",
    code_dir: str | None = None,
    drops_faulty: bool = False,
    loss_columns: tuple[str, ...] = (),
) -> list[Corpus]:
    """Returns the opened corpus of each source. field: the recipe field that lists the sources.

    code_dir, drops_faulty: the folder of a user's own functions, and whether rows for which they fail are left out.
    loss_columns: `objective.columns`.
    Raises DataError with all faults.
    """
    corpora: list[Corpus] = []
    problems: list[Problem] = []
    for number, source in enumerate(sources):
        try:
            code = RowCode(source.own_functions, code_dir, f"{field}.{number}", drops_faulty)
            corpora.append(_open_corpus(source, code, cache, loss_columns))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return corpora


def row_counts(corpus: Corpus) -> RowCounts | None:
    """Returns what became of the rows in the last pass; None if all are read as they are."""
    rows = corpus.rows if isinstance(corpus, ConversationCorpus) else corpus
    return rows.counts if isinstance(rows, OwnRows) and (rows.code.functions or rows.counts.faulty) else None


def held_out(text: str, eval_fraction: float) -> bool:
    """Whether a document belongs to the evaluation split.

    This depends only on the text, so neither the order of the documents nor new ones move a document to the other
    split, and copies of a document are always in the same split.
    """
    return xxhash.xxh3_64_intdigest(text.encode()) < eval_fraction * 2**64


def split_documents(
    corpus: Corpus, eval_fraction: float, on_document: Callable[[str], None] = lambda _: None
) -> Iterator[CorpusPart]:
    """Yields the documents with their split. If the corpus is a single document, its end is held out.

    on_document: called with each document.
    """
    for document in corpus.documents():
        text, fraction = document.text, document.fraction
        on_document(text)
        if _holds_out_the_end(corpus, eval_fraction):
            cut = _cut_before_the_end(text, eval_fraction)
            yield CorpusPart(text[:cut], fraction * (1 - eval_fraction), is_held_out=False)
            yield CorpusPart(text[cut:], fraction, is_held_out=True)
        else:
            yield CorpusPart(text, fraction, held_out(text, eval_fraction), document.values)


def split_identity(corpus: Corpus, eval_fraction: float) -> str:
    """Returns a key that, together with the fraction, identifies the result of `split_documents`."""
    return key_of(corpus.identity, "end") if _holds_out_the_end(corpus, eval_fraction) else corpus.identity


def first_break(text: str, lowest: int, highest: int) -> int | None:
    """Returns the first position in a range at which byte-level tokenizers split a text anyway.

    This is after a line end, or else before a space. Returns None if the range has neither.
    """
    match = LINE_END.search(text, lowest, highest) or WORD_START.search(text, lowest, highest)
    return match.end() if match else None


def _columns(corpus: Corpus, cache: Cache) -> list[str]:
    """Returns the columns of the first row (cached); empty for plain text, and for a hub dataset if it declares none.

    Of files, only the first one is read.
    """
    if isinstance(corpus, HubCorpus):
        return list(corpus.columns)
    if isinstance(corpus, FileCorpus) and corpus.has_texts:
        return []
    if isinstance(corpus, FileCorpus):
        key, rows = key_of(corpus.kind, corpus.prints[0].hash), READERS[corpus.kind](corpus.files[0], None)
    elif isinstance(corpus, OwnRows):
        whole = replace(corpus, column=None, loss_columns=())
        key, rows = key_of(whole.identity), whole.documents()

    def build(_: Path) -> dict[str, Any]:
        with closing(rows):  # type: ignore[type-var]
            return {"columns": list(json.loads(first.text)) if (first := next(rows, None)) else []}

    columns: list[str] = cache.entry("columns", key, build).meta["columns"]
    return columns


def _hold_conversations(source: Source, corpus: Corpus, cache: Cache) -> bool:
    """Whether a source of format `auto` has conversations instead of a text column."""
    if source.format != "auto":
        return False
    considered = [name for name in _columns(corpus, cache) if name not in source.ignore]
    if source.text_column in considered:
        return False
    try:
        find_layout(considered, "", format=None, named=source.columns, system=source.system)
    except DataError:
        return False
    return True


def _holds_out_the_end(corpus: Corpus, eval_fraction: float) -> bool:
    return corpus.is_one_document and 0 < eval_fraction < 1


def _cut_before_the_end(text: str, fraction: float) -> int:
    """Returns where the last `fraction` of a text begins, moved to the next line or word if one begins nearby."""
    exact = int(len(text) * (1 - fraction))
    return first_break(text, exact, (exact + len(text)) // 2) or exact


def _open_corpus(source: Source, code: RowCode, cache: Cache, loss_columns: tuple[str, ...]) -> Corpus:
    form = None if source.format in ("auto", "text") else source.format
    if source.name == STDLIB_CHAT and source.reader is None:
        form = "messages"
    column = source.text_column if form is None else None
    opened: FileCorpus | HubCorpus | StdlibChat | ReaderCorpus | OwnRows
    if code.functions or loss_columns:
        if source.reader:
            _refuse_hub_fields(source, ("subset", "revision"), code.field)
        rows = reader_corpus(source, code, cache) if source.reader else _open_rows(source, code.field, cache, None)
        opened = OwnRows(rows, code, column, loss_columns)
    else:
        opened = _open_rows(source, code.field, cache, column)
        if source.name == STDLIB:
            return opened
    if column is not None and _hold_conversations(source, opened, cache):
        assert not isinstance(opened, StdlibChat | ReaderCorpus)  # read as conversations, or within OwnRows
        opened, column = replace(opened, column=None), None
    if column is not None:
        return opened
    columns = tuple(source.columns.items())
    chat = ChatSource(form, columns, source.system, tuple(source.ignore), loss_columns)  # type: ignore[arg-type]
    return ConversationCorpus(opened, chat)


def _open_rows(source: Source, field: str, cache: Cache, column: str | None) -> FileCorpus | HubCorpus | StdlibChat:
    """Returns the corpus of a source without a reader. column: the column of the text; None to read whole rows."""
    if source.name in (STDLIB, STDLIB_CHAT):
        _refuse_hub_fields(source, ("subset", "split", "revision"), field)
        files = stdlib_corpus(cache)
        return files if source.name == STDLIB else StdlibChat(files)
    if paths := find_files(source.name, source.split, field):
        _refuse_hub_fields(source, ("subset", "revision"), field)
        return file_corpus(source, paths, cache, column)
    if HUB_NAME.fullmatch(source.name) and not source.name.endswith((*READERS, *COMPRESSIONS)):
        return hub_corpus(source, field, cache, column)
    here = expanded(source.name).absolute()
    message = (
        f"'{source.name}' was not found: no file, folder or glob matches {here}, and it is not the "
        "name of a hub dataset"
    )
    raise DataError(Problem("data.missing", f"{field}.name", message))


def _refuse_hub_fields(source: Source, names: Sequence[str], field: str) -> None:
    """Raises DataError for fields that select a part of a dataset on the hub."""
    message = f"has no effect, since '{source.name}' is not a dataset on the hub"
    given = [name for name in names if getattr(source, name) != type(source).model_fields[name].default]
    if given:
        raise DataError([Problem("data.local", f"{field}.{name}", message, "leave it out") for name in given])
