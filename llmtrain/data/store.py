"""The tokens of a corpus on disk: written in one pass, opened memory-mapped."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.arrays import ArrayWriter, open_array, require_all_intact
from llmtrain.data.cache import Cache, Entry, key_of
from llmtrain.data.chat.encode import ChatEncoder
from llmtrain.data.chat.store import ChatOptions, tokenize_conversations
from llmtrain.data.prefetch import prefetched
from llmtrain.data.progress import Task
from llmtrain.data.sources.corpus import ConversationCorpus, Corpus, split_documents, split_identity
from llmtrain.data.sources.special import SpecialTokenCounter, SpecialTokenCounts, refuse_many
from llmtrain.data.tokenizer import Encoder, PreparedTokenizer, split_text
from llmtrain.errors import DataError, Problem
from llmtrain.system.streams import short_names

FORMAT = 1
"""Version of the layout of a store; part of its key."""
BATCH_CHARACTERS = 4_000_000
"""Number of characters that are encoded together: enough for many cores, with some 100 MB of memory."""
BATCH_CHUNKS = 8192
BUFFER_TOKENS = 1 << 18

Split = Literal["train", "eval"]
SpecialTokens = Literal["refuse", "text", "parse"]
SPLITS: tuple[Split, ...] = ("train", "eval")


@dataclass(frozen=True)
class Stream:
    """The documents of a split, concatenated.

    A document consists of its tokens and the end-of-text token, preceded by the token that the tokenizer puts first, if
    any.
    """

    tokens: NDArray[Any]
    """[tokens], uint16 or uint32."""
    documents: NDArray[np.uint64]
    """[documents + 1]: the start of each document, and the end of the last one."""
    loss_mask: NDArray[np.bool_] | None = None
    """[tokens]: whether a token is a label, so that the loss includes its prediction; None if all are."""
    holds_pairs: bool = False
    """Whether each two documents are a pair: the chosen conversation, then the rejected one."""
    desirable: NDArray[np.bool_] | None = None
    """[documents / 2]: whether a labelled conversation is desirable; None for others. Each is followed by a mismatched
    one: its prompt with the completion of another prompt."""

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
        """Duration of its preparation."""
        return float(self.meta["seconds"])

    @property
    def special(self) -> SpecialTokenCounts | None:
        """Texts of special tokens in the documents; None in a store of an earlier version, which did not count them."""
        found = self.meta.get("special_tokens")
        return None if found is None else SpecialTokenCounts(**found)

    def counts(self) -> NDArray[np.int64]:
        """Returns how many times each token occurs in the training split, [vocabulary]."""
        counts = open_array(self.path, "train_counts", np.int64, self.meta["vocab_size"])
        require_all_intact(counts)
        return counts

    def _stream(self, split: Split) -> Stream:
        length = self.meta["splits"][split]
        tokens = open_array(self.path, f"{split}_tokens", self.meta["dtype"], length["tokens"])
        documents = open_array(self.path, f"{split}_documents", np.uint64, length["documents"] + 1)
        of_chats = "conversations" in self.meta
        trained = open_array(self.path, f"{split}_trained", np.bool_, length["tokens"]) if of_chats else None
        labelled = self.meta.get("judged", False)
        labels = open_array(self.path, f"{split}_desirable", np.bool_, length["documents"] // 2) if labelled else None
        return Stream(tokens, documents, trained, self.meta.get("pairs", False), labels)


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

    @property
    def parses(self) -> bool:
        """Whether texts of special tokens are read as the tokens."""
        return self.special_tokens == "parse"

    def key(self, corpus: Corpus) -> str:
        """Identifies the tokens of a corpus that is read in this way."""
        parts = [split_identity(corpus, self.eval_fraction), self.tokenizer.identity, self.eval_fraction]
        chat = self.chat.key() if self.chat and isinstance(corpus, ConversationCorpus) else []
        return key_of("tokens", FORMAT, *parts, *(["parse"] if self.parses else []), *chat)

    def check(self, counts: SpecialTokenCounts, corpus: Corpus, field: str, encoder: Encoder) -> None:
        """Raises DataError if there are more texts of special tokens than may be read without asking."""
        if self.special_tokens == "refuse":
            refuse_many(counts, corpus.name, field, encoder.text_of(self.tokenizer.eos_id))


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
                meta = _tokenize_conversations(folder, corpus, field, options, task)
            else:
                meta = _tokenize(folder, corpus, field, options, task)
        train, held_out = (meta["splits"][split]["documents"] for split in SPLITS)
        if not train + held_out:
            raise DataError(_nothing(corpus, field, meta, options))
        if not train and options.eval_fraction < 1:
            fix = "lower data.eval_fraction, or set evaluation.sources"
            raise DataError(Problem("data.empty", field, f"all {held_out} documents were held out of training", fix))
        return meta

    store = TokenStore(cache.entry("tokens", options.key(corpus), build))
    if not store.made and options.special_tokens == "refuse":
        found = store.special or _count_special_tokens(corpus, options, cache)
        if not found.are_few:
            options.check(found, corpus, field, Encoder(options.tokenizer.folder))
    return store


def _nothing(corpus: Corpus, field: str, meta: dict[str, Any], options: TokenizeOptions) -> Problem:
    """Returns why a store has no documents."""
    if options.chat and (dropped := meta.get("conversations", {}).get("dropped")):
        message = f"all {dropped:,} rows of '{corpus.name}' are longer than a sequence of"
        fix = "increase data.sequence_length"
        if options.chat.too_long == "drop" and not meta["pairs"] and not meta["judged"]:
            fix += ", or --set data.too_long=cut_turns keeps the turns that fit"
        return Problem("data.too_long", field, f"{message} {options.chat.sequence_length:,} tokens", fix)
    return Problem("data.empty", field, f"'{corpus.name}' contains no text")


def _count_special_tokens(corpus: Corpus, options: TokenizeOptions, cache: Cache) -> SpecialTokenCounts:
    """Counts the special tokens of a corpus whose store was made by a version that did not."""

    def build(_: Path) -> dict[str, Any]:
        counter = SpecialTokenCounter(Encoder(options.tokenizer.folder).special_tokens())
        with cache.progress.task(f"Looking for special tokens in {corpus.name}") as task:
            for text, fraction, *_others in corpus.documents():
                counter.count(text)
                task.update(fraction)
        return asdict(counter.counts())

    key = key_of("special", corpus.identity, options.tokenizer.identity)
    return SpecialTokenCounts(**cache.entry("special", key, build).meta)


class _TextChunk(NamedTuple):
    """A part of a document that is tokenized at once."""

    text: str
    split: Split
    last: bool
    """Whether it is the last chunk of the document."""
    fraction: float
    """Fraction of the corpus read."""


class _SplitWriter:
    """Writes the stream of one split."""

    def __init__(self, folder: Path, split: Split, options: TokenizeOptions, stack: ExitStack) -> None:
        tokenizer = options.tokenizer
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        self._tokens = stack.enter_context(ArrayWriter(folder, f"{split}_tokens", dtype))
        self._documents = stack.enter_context(ArrayWriter(folder, f"{split}_documents", np.uint64))
        self._before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        self._after = [tokenizer.eos_id]
        self._parses = options.parses
        self._buffer: list[int] = []
        self._ends = [0]
        self._last: int | None = None
        self.dtype = np.dtype(dtype).name
        self.counts = np.zeros(tokenizer.vocab_size, np.int64)
        self.documents = 0

    @property
    def tokens(self) -> int:
        return self._tokens.length + len(self._buffer)

    def add(self, ids: list[int], last: bool) -> None:
        """Appends a chunk; a document without tokens adds nothing.

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
            self._ends.append(self.tokens)
            self.documents += 1
        if len(self._buffer) >= BUFFER_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Writes the buffer to the files."""
        tokens = np.array(self._buffer, self._tokens.dtype)
        self._buffer.clear()
        self._tokens.append(tokens)
        self.counts += np.bincount(tokens, minlength=len(self.counts))
        self._documents.append(np.array(self._ends, np.uint64))
        self._ends.clear()

    def summary(self) -> dict[str, int]:
        return {"documents": self.documents, "tokens": self.tokens}


def _tokenize(folder: Path, corpus: Corpus, field: str, options: TokenizeOptions, task: Task) -> dict[str, Any]:
    """Writes both splits of a store in one pass over the corpus; returns its metadata."""
    started = time.perf_counter()
    encoder = Encoder(options.tokenizer.folder, options.parses)
    counter = SpecialTokenCounter(encoder.special_tokens())
    characters = 0
    with ExitStack() as stack:
        writers = {split: _SplitWriter(folder, split, options, stack) for split in SPLITS}
        batches = prefetched(_batches(corpus, options.eval_fraction, counter))
        stack.callback(batches.close)
        for batch, found in batches:
            options.check(found, corpus, field, encoder)
            texts = [chunk.text for chunk in batch]
            for chunk, ids in zip(batch, encoder.encode(texts), strict=True):
                writers[chunk.split].add(ids, chunk.last)
            characters += sum(map(len, texts))
            task.update(batch[-1].fraction, _detail(writers, time.perf_counter() - started))
        for writer in writers.values():
            writer.flush()
        counts = stack.enter_context(ArrayWriter(folder, "train_counts", np.int64))
        counts.append(writers["train"].counts)
    return {
        "corpus": corpus.name,
        "dtype": writers["train"].dtype,
        "vocab_size": options.tokenizer.vocab_size,
        "splits": {split: writer.summary() for split, writer in writers.items()},
        "characters": characters,
        "special_tokens": asdict(counter.counts()),
        "seconds": time.perf_counter() - started,
    }


def _tokenize_conversations(
    folder: Path, corpus: ConversationCorpus, field: str, options: TokenizeOptions, task: Task
) -> dict[str, Any]:
    """As `_tokenize`, for conversations."""
    assert options.chat is not None, "conversations are read with a template"
    tokenizer, chat = options.tokenizer, options.chat
    plain = Encoder(tokenizer.folder)
    counter = SpecialTokenCounter(plain.special_tokens())
    encoder = ChatEncoder(tokenizer.folder, chat.template, train_on=chat.train_on, parse_special=options.parses)
    meta = tokenize_conversations(
        folder,
        corpus,
        field,
        options=chat,
        encoder=encoder,
        counter=counter,
        eval_fraction=options.eval_fraction,
        vocab_size=tokenizer.vocab_size,
        task=task,
    )
    options.check(counter.counts(), corpus, field, plain)
    return meta


def _batches(
    corpus: Corpus, eval_fraction: float, counter: SpecialTokenCounter
) -> Iterator[tuple[list[_TextChunk], SpecialTokenCounts]]:
    """Yields the corpus in batches of chunks, large enough for all cores, with what `counter` has found so far."""
    batch: list[_TextChunk] = []
    characters = 0
    for text, fraction, is_held_out in split_documents(corpus, eval_fraction, counter.count):
        split: Split = "eval" if is_held_out else "train"
        chunks = list(split_text(text))
        for number, chunk in enumerate(chunks, start=1):
            batch.append(_TextChunk(chunk, split, number == len(chunks), fraction))
            characters += len(chunk)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_CHUNKS:
                yield batch, counter.counts()
                batch, characters = [], 0
    if batch:
        yield batch, counter.counts()


def _detail(writers: dict[Split, _SplitWriter], seconds: float) -> str:
    documents = sum(writer.documents for writer in writers.values())
    tokens = sum(writer.tokens for writer in writers.values())
    return f"{documents:,} documents, {tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
