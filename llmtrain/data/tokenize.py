"""Tokenizes corpora into the cache: each in one pass, with its held-out documents in a stream of their own."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from llmtrain.data.cache import Cache, key_of
from llmtrain.data.chat.tokenize import ChatOptions, tokenize_conversations
from llmtrain.data.prefetch import prefetched
from llmtrain.data.progress import Task
from llmtrain.data.sources.corpus import (
    SPLITS,
    ConversationCorpus,
    Corpus,
    Split,
    row_counts,
    split_documents,
    split_identity,
)
from llmtrain.data.sources.own_rows import RowCounts
from llmtrain.data.sources.special import SpecialTokenCounter, SpecialTokenCounts, too_many
from llmtrain.data.store import StreamWriter, TokenStore, write_counts
from llmtrain.data.tokenizer import Encoder, PreparedTokenizer, split_text
from llmtrain.errors import DataError, Problem
from llmtrain.system.streams import short_names

FORMAT = 1
"""Version of the layout of a store; part of its key."""
BATCH_CHARACTERS = 4_000_000
"""Number of characters that are encoded together: enough for many cores, with some 100 MB of memory."""
BATCH_CHUNKS = 8192
BUFFER_TOKENS = 1 << 18

SpecialTokens = Literal["refuse", "text", "parse"]


@dataclass(frozen=True)
class TokenizeOptions:
    """The options for tokenizing the documents of a corpus and splitting them."""

    tokenizer: PreparedTokenizer
    special_tokens: SpecialTokens
    """As in `DataConfig`."""
    eval_fraction: float
    """Fraction of the documents held out; 1 for an evaluation corpus."""
    chat: ChatOptions | None = None
    """The options for reading conversations, if there are any."""
    loss_columns: tuple[str, ...] = ()
    """`objective.columns`; a corpus identifies them."""

    @property
    def parses(self) -> bool:
        """Whether texts of special tokens are read as the tokens."""
        return self.special_tokens == "parse"

    def key(self, corpus: Corpus) -> str:
        """Identifies the tokens of a corpus that is read in this way."""
        parts = [split_identity(corpus, self.eval_fraction), self.tokenizer.identity, self.eval_fraction]
        chat = self.chat.key() if self.chat and isinstance(corpus, ConversationCorpus) else []
        return key_of("tokens", FORMAT, *parts, *(["parse"] if self.parses else []), *chat)

    def check(self, counts: SpecialTokenCounts, corpus: Corpus, field: str) -> None:
        """Raises DataError if there are more texts of special tokens than may be read without asking."""
        if self.special_tokens == "refuse" and not counts.are_few:
            end_of_text = Encoder(self.tokenizer.folder).text_of(self.tokenizer.eos_id)
            raise DataError(too_many(counts, corpus.name, field, end_of_text))


def token_store(corpus: Corpus, field: str, options: TokenizeOptions, cache: Cache) -> TokenStore:
    """Returns the token store of a corpus, made if it is not in the cache.

    Raises DataError for an unreadable or empty corpus (`field` is its recipe field), texts of special tokens that are
    refused, a full disk or an unwritable cache.
    """

    def build(folder: Path) -> dict[str, Any]:
        gc.collect()
        gc.freeze()  # the rows of a corpus start many collections, and each would scan the objects of all libraries
        with cache.progress.task(f"Tokenizing {short_names([corpus.name])[corpus.name]}") as task:
            if isinstance(corpus, ConversationCorpus):
                assert options.chat is not None, "conversations are read with a template"
                meta = tokenize_conversations(
                    folder,
                    corpus,
                    field,
                    options=options.chat,
                    tokenizer=options.tokenizer,
                    parse_special=options.parses,
                    eval_fraction=options.eval_fraction,
                    loss_columns=options.loss_columns,
                    task=task,
                )
            else:
                meta = _tokenize(folder, corpus, field, options, task)
        if (counts := row_counts(corpus)) is not None:
            meta["rows"] = asdict(counts) | {"summary": str(counts)}
        train, held_out = (meta["splits"][split]["documents"] for split in SPLITS)
        if not train + held_out:
            raise DataError(_no_documents(corpus, field, meta, options))
        if not train and options.eval_fraction < 1:
            fix = "lower data.eval_fraction, or set evaluation.sources"
            raise DataError(Problem("data.empty", field, f"all {held_out} documents were held out of training", fix))
        return meta

    store = TokenStore(cache.entry("tokens", options.key(corpus), build))
    options.check(store.special, corpus, field)
    return store


def _no_documents(corpus: Corpus, field: str, meta: dict[str, Any], options: TokenizeOptions) -> Problem:
    """Returns why a store has no documents."""
    if options.chat and (dropped := meta.get("conversations", {}).get("dropped")):
        message = f"all {dropped:,} rows of '{corpus.name}' are longer than a sequence of"
        fix = "increase data.sequence_length"
        if options.chat.too_long == "drop" and not meta["pairs"] and not meta["judged"]:
            fix += ", or --set data.too_long=cut_turns keeps the turns that fit"
        return Problem("data.too_long", field, f"{message} {options.chat.sequence_length:,} tokens", fix)
    counts = row_counts(corpus)
    return Problem("data.empty", field, f"'{corpus.name}' contains no text" + (f" ({counts})" if counts else ""))


class _TextChunk(NamedTuple):
    """A part of a document that is tokenized at once."""

    text: str
    split: Split
    last: bool
    """Whether it is the last chunk of the document."""
    fraction: float
    """Fraction of the corpus read."""
    values: tuple[float, ...]
    """Those of its document (`Document.values`)."""


class _TextWriter(StreamWriter):
    """Writes the texts of one split."""

    def __init__(self, folder: Path, split: Split, options: TokenizeOptions, stack: ExitStack) -> None:
        tokenizer = options.tokenizer
        super().__init__(folder, split, tokenizer.vocab_size, stack, options.loss_columns)
        self._before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        self._after = [tokenizer.eos_id]
        self._parses = options.parses
        self._buffer: list[int] = []
        self._ends: list[int] = []
        self._buffered_values: list[tuple[float, ...]] = []
        self._last: int | None = None

    def add(self, ids: list[int], last: bool, values: tuple[float, ...]) -> None:
        """Appends a chunk; a document without tokens adds nothing. values: those of its document.

        If special tokens are parsed, a document that already has the first or last token does not get it twice.
        """
        if ids:
            if self._last is None and not (self._parses and ids[:1] == self._before):
                self._buffer += self._before
            self._buffer += ids
            self._last = ids[-1]
        if last and self._last is not None:
            if not (self._parses and [self._last] == self._after):
                self._buffer += self._after
            self._last = None
            self._ends.append(self.tokens + len(self._buffer))
            self._buffered_values.append(values)
        if len(self._buffer) >= BUFFER_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Writes the buffer to the files."""
        self.append(np.array(self._buffer, self.dtype), np.array(self._ends, np.uint64), self._buffered_values)
        self._buffer.clear()
        self._ends.clear()
        self._buffered_values.clear()


def _tokenize(folder: Path, corpus: Corpus, field: str, options: TokenizeOptions, task: Task) -> dict[str, Any]:
    """Writes both splits of a store in one pass over the corpus; returns its metadata."""
    started = time.perf_counter()
    encoder = Encoder(options.tokenizer.folder, options.parses)
    counter = SpecialTokenCounter(encoder.special_tokens())
    with ExitStack() as stack:
        writers = {split: _TextWriter(folder, split, options, stack) for split in SPLITS}
        batches = prefetched(_batches(corpus, options.eval_fraction, counter))
        stack.callback(batches.close)
        for batch, counts in batches:
            options.check(counts, corpus, field)
            texts = [chunk.text for chunk in batch]
            for chunk, ids in zip(batch, encoder.encode(texts), strict=True):
                writers[chunk.split].add(ids, chunk.last, chunk.values)
            task.update(batch[-1].fraction, _detail(writers, time.perf_counter() - started, row_counts(corpus)))
        for writer in writers.values():
            writer.flush()
    special = counter.counts()
    return {
        "corpus": corpus.name,
        **write_counts(folder, writers),
        "characters": special.characters,
        "special_tokens": asdict(special),
        "seconds": time.perf_counter() - started,
    }


def _batches(
    corpus: Corpus, eval_fraction: float, counter: SpecialTokenCounter
) -> Iterator[tuple[list[_TextChunk], SpecialTokenCounts]]:
    """Yields the corpus in batches of chunks, large enough for all cores, with what `counter` has found so far."""
    batch: list[_TextChunk] = []
    characters = 0
    for text, fraction, is_held_out, values in split_documents(corpus, eval_fraction, counter.count):
        split: Split = "eval" if is_held_out else "train"
        chunks = list(split_text(text))
        for number, chunk in enumerate(chunks, start=1):
            batch.append(_TextChunk(chunk, split, number == len(chunks), fraction, values))
            characters += len(chunk)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_CHUNKS:
                yield batch, counter.counts()
                batch, characters = [], 0
    if batch:
        yield batch, counter.counts()


def _detail(writers: dict[Split, _TextWriter], seconds: float, rows: RowCounts | None) -> str:
    documents = sum(writer.documents for writer in writers.values())
    tokens = sum(writer.tokens for writer in writers.values())
    done = f"{documents:,} documents, {tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
    return f"{done}, {rows}" if rows else done
