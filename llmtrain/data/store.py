"""The tokens of a corpus on disk: made in one pass, opened memory-mapped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.arrays import ArrayWriter, open_array
from llmtrain.data.cache import Cache, Entry, key_of
from llmtrain.data.corpus import Corpus, held_out
from llmtrain.data.prefetch import prefetched
from llmtrain.data.progress import Task
from llmtrain.data.tokenizer import PreparedTokenizer, cut
from llmtrain.errors import DataError, Problem

FORMAT = 1
"""Version of the layout of a store; part of its key."""
BATCH_CHARACTERS = 4_000_000
"""Text that is encoded at once: enough for many cores, and some 100 MB while it is."""
BATCH_PIECES = 8192
BUFFER_TOKENS = 1 << 18

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")


@dataclass(frozen=True)
class Stream:
    """The documents of a split, one after another.

    A document is its tokens and the end-of-text token, after the token that the tokenizer puts
    first, if it puts one.
    """

    tokens: NDArray[Any]
    """[tokens], uint16 or uint32."""
    documents: NDArray[np.uint64]
    """[documents + 1]: where each document starts, and the end of the last one."""

    def __len__(self) -> int:
        return len(self.tokens)


class TokenStore:
    """The tokens of one corpus under one tokenizer, in both splits."""

    def __init__(self, entry: Entry) -> None:
        self.path = entry.path
        self.key = entry.path.name
        self.made = entry.made
        self.meta = entry.meta
        self.streams = {split: self._stream(split) for split in SPLITS}

    @property
    def seconds(self) -> float:
        """What making it took."""
        return float(self.meta["seconds"])

    def counts(self) -> NDArray[np.int64]:
        """[vocab]: how often each token occurs in the training split."""
        return open_array(self.path, "train_counts", np.int64, self.meta["vocab_size"])

    def _stream(self, split: Split) -> Stream:
        length = self.meta["splits"][split]
        tokens = open_array(self.path, f"{split}_tokens", self.meta["dtype"], length["tokens"])
        documents = open_array(self.path, f"{split}_documents", np.uint64, length["documents"] + 1)
        return Stream(tokens, documents)


def token_store(
    corpus: Corpus, field: str, tokenizer: PreparedTokenizer, eval_fraction: float, cache: Cache
) -> TokenStore:
    """The store of a corpus, made if it is not in the cache.

    Raises DataError for an unreadable or empty corpus (`field` is its recipe field), a full disk or
    an unwritable cache.
    """
    key = key_of("tokens", FORMAT, corpus.identity, tokenizer.identity, eval_fraction)

    def build(folder: Path) -> dict[str, Any]:
        with cache.progress.task(f"Tokenizing {corpus.name}") as task:
            meta = _tokenize(folder, corpus, tokenizer, eval_fraction, task)
        if meta["splits"]["train"]["documents"] == 0:
            held = meta["splits"]["eval"]["documents"]
            message = f"'{corpus.name}' has no text" if not held else f"all {held} documents were held out of training"
            raise DataError(Problem("data.empty", field, message, "" if not held else "lower data.eval_fraction"))
        return meta

    return TokenStore(cache.entry("tokens", key, build))


class _Piece(NamedTuple):
    """A part of a document that is tokenized at once."""

    text: str
    split: Split
    last: bool
    """Whether the document ends with it."""
    fraction: float
    """Share of the corpus read."""


class _SplitWriter:
    """Writes the stream of one split."""

    def __init__(self, folder: Path, split: Split, tokenizer: PreparedTokenizer, stack: ExitStack) -> None:
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        self._tokens = stack.enter_context(ArrayWriter(folder, f"{split}_tokens", dtype))
        self._documents = stack.enter_context(ArrayWriter(folder, f"{split}_documents", np.uint64))
        self._before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        self._after = [tokenizer.eos_id]
        self._buffer: list[int] = []
        self._ends = [0]
        self._inside = False
        self.dtype = np.dtype(dtype).name
        self.counts = np.zeros(tokenizer.vocab_size, np.int64)
        self.documents = 0

    @property
    def tokens(self) -> int:
        return self._tokens.length + len(self._buffer)

    def add(self, ids: list[int], last: bool) -> None:
        """Appends a piece; a document without any token leaves no trace."""
        if ids and not self._inside:
            self._buffer += self._before
            self._inside = True
        self._buffer += ids
        if last and self._inside:
            self._buffer += self._after
            self._inside = False
            self._ends.append(self.tokens)
            self.documents += 1
        if len(self._buffer) >= BUFFER_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Hands what is buffered to the files."""
        tokens = np.array(self._buffer, self._tokens.dtype)
        self._buffer.clear()
        self._tokens.append(tokens)
        self.counts += np.bincount(tokens, minlength=len(self.counts))
        self._documents.append(np.array(self._ends, np.uint64))
        self._ends.clear()

    def summary(self) -> dict[str, int]:
        return {"documents": self.documents, "tokens": self.tokens}


def _tokenize(
    folder: Path, corpus: Corpus, tokenizer: PreparedTokenizer, eval_fraction: float, task: Task
) -> dict[str, Any]:
    """Writes both splits of a store in one pass over the corpus; returns its meta data."""
    started = time.perf_counter()
    encoder = tokenizer.encoder()
    characters = 0
    with ExitStack() as stack:
        writers = {split: _SplitWriter(folder, split, tokenizer, stack) for split in SPLITS}
        batches = prefetched(_batches(corpus, eval_fraction))
        stack.callback(batches.close)
        for batch in batches:
            texts = [piece.text for piece in batch]
            for piece, ids in zip(batch, encoder.encode(texts), strict=True):
                writers[piece.split].add(ids, piece.last)
            characters += sum(map(len, texts))
            task.update(batch[-1].fraction, _detail(writers, time.perf_counter() - started))
        for writer in writers.values():
            writer.flush()
        counts = stack.enter_context(ArrayWriter(folder, "train_counts", np.int64))
        counts.append(writers["train"].counts)
    return {
        "corpus": corpus.name,
        "dtype": writers["train"].dtype,
        "vocab_size": tokenizer.vocab_size,
        "splits": {split: writer.summary() for split, writer in writers.items()},
        "characters": characters,
        "seconds": time.perf_counter() - started,
    }


def _batches(corpus: Corpus, eval_fraction: float) -> Iterator[list[_Piece]]:
    """The corpus in pieces, as many at once as keep all cores busy in little memory."""
    batch: list[_Piece] = []
    characters = 0
    for text, fraction in corpus.documents():
        split: Split = "eval" if held_out(text, eval_fraction) else "train"
        pieces = list(cut(text))
        for number, piece in enumerate(pieces, start=1):
            batch.append(_Piece(piece, split, number == len(pieces), fraction))
            characters += len(piece)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _detail(writers: dict[Split, _SplitWriter], seconds: float) -> str:
    documents = sum(writer.documents for writer in writers.values())
    tokens = sum(writer.tokens for writer in writers.values())
    return f"{documents:,} documents, {tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
