"""From a recipe to sequences on disk: tokenizer, tokens, packing, each made once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.data import packing
from llmtrain.data.cache import Cache, NotPreparedError, cache_folder, key_of
from llmtrain.data.corpus import Corpus, open_corpora
from llmtrain.data.evaluation import EvalOrder
from llmtrain.data.mixture import integer_weights
from llmtrain.data.progress import Progress
from llmtrain.data.samples import ConcatSamples, Samples, packed_samples
from llmtrain.data.store import SPLITS, TokenStore, token_store
from llmtrain.data.tokenizer import FIELD, PreparedTokenizer, prepare_tokenizer
from llmtrain.errors import DataError, Problem
from llmtrain.recipe import DataConfig, Recipe, Source
from llmtrain.untrusted import why


@dataclass(frozen=True)
class PreparedSource:
    """The sequences of one source."""

    name: str
    weight: float
    """Its share of training, relative to the other sources."""
    key: str
    """Names the content: corpus, tokenizer, split, packing, sequence length."""
    store: TokenStore
    train: Samples
    eval: Samples
    made: bool
    """Whether this call made the tokens or the packing."""


@dataclass(frozen=True)
class Prepared:
    """Everything that training reads, ready on this machine."""

    tokenizer: PreparedTokenizer
    sources: tuple[PreparedSource, ...]
    sequence_length: int
    """T."""
    made: bool
    """Whether this call made anything; False where all of it was in the cache."""
    seconds: float
    """What this call took, waiting for another process included."""

    @property
    def key(self) -> str:
        """Names all that is read and its proportions: equal keys and seeds give equal batches at equal cursors."""
        weights = integer_weights([source.weight for source in self.sources])
        return key_of([source.key for source in self.sources], weights)

    @property
    def tokenizer_dir(self) -> Path:
        """Folder that `AutoTokenizer.from_pretrained` loads."""
        return self.tokenizer.folder

    @property
    def vocab_size(self) -> int:
        """Highest token id plus one."""
        return self.tokenizer.vocab_size

    @property
    def eos_id(self) -> int:
        """Token that ends each document, and pads."""
        return self.tokenizer.eos_id

    @property
    def train_sequences(self) -> int:
        """Training sequences, each counted once."""
        return sum(len(source.train) for source in self.sources)

    @property
    def eval_sequences(self) -> int:
        """Held-out sequences."""
        return sum(len(source.eval) for source in self.sources)

    def unigram_loss(self, max_sequences: int | None = None) -> float:
        """Mean cross-entropy (nats per token) of a unigram model on the targets of the evaluation.

        Its probabilities are the token counts of the training split, each plus one. What a model
        that has learned anything stays below. NaN without held-out sequences.
        """
        counts = np.add.reduce([source.store.counts() for source in self.sources]) + 1
        loss = -np.log(counts / counts.sum())
        order = EvalOrder([source.eval for source in self.sources], [source.key for source in self.sources])
        total, targets = 0.0, 0
        for rows in order.read(max_sequences):
            labels = rows.labels[rows.labels >= 0]
            total += float(loss[labels].sum())
            targets += labels.size
        return total / targets if targets else float("nan")


def prepare(recipe: Recipe, progress: Progress | None = None) -> Prepared:
    """Makes what the recipe's data needs, or finds it in the cache.

    Any number of processes may call this at once: one makes a part, the others wait and open it.
    A call that finds everything reads no corpus, and imports neither `datasets` nor `torch`.

    Raises DataError for sources or a tokenizer that cannot be used, a tokenizer larger than the
    model's vocabulary, an empty corpus, and a cache that is full or cannot be written.
    """
    return _prepare(recipe, Cache(cache_folder(recipe.data), progress or Progress()))


def find_prepared(recipe: Recipe) -> Prepared | None:
    """What `prepare` would open, where all of it is in the cache; else None. Makes nothing."""
    try:
        return _prepare(recipe, Cache(cache_folder(recipe.data), Progress(), read_only=True))
    except (NotPreparedError, DataError):
        return None


def _prepare(recipe: Recipe, cache: Cache) -> Prepared:
    try:
        return _made(recipe, cache)
    except OSError as error:  # as where a folder on the way to a file is closed
        raise DataError(Problem("data.read", str(error.filename or "data"), f"cannot be used: {why(error)}")) from error


def _made(recipe: Recipe, cache: Cache) -> Prepared:
    started = time.perf_counter()
    data = recipe.data
    corpora = open_corpora(data.sources, cache)
    tokenizer = prepare_tokenizer(data, corpora, cache)
    _check_vocabulary(recipe, tokenizer)
    sources = _prepare_sources(data, corpora, tokenizer, cache)
    made = tokenizer.made or any(source.made for source in sources)
    prepared = Prepared(tokenizer, sources, data.sequence_length, made, time.perf_counter() - started)
    _check_evaluation(recipe, prepared)
    return prepared


def _prepare_sources(
    data: DataConfig, corpora: Sequence[Corpus], tokenizer: PreparedTokenizer, cache: Cache
) -> tuple[PreparedSource, ...]:
    """Every source; the faults of all of them are raised together."""
    sources: list[PreparedSource] = []
    problems: list[Problem] = []
    for number, (source, corpus) in enumerate(zip(data.sources, corpora, strict=True)):
        try:
            store = token_store(corpus, f"data.sources.{number}.name", tokenizer, data.eval_fraction, cache)
            sources.append(packed_source(data, source, store, tokenizer, cache))
        except DataError as error:
            problems += error.problems
            if any(problem.rule in ("data.disk", "data.cache") for problem in error.problems):
                break  # the next source would only meet it again
    if problems:
        raise DataError(problems)
    return tuple(sources)


def packed_source(
    data: DataConfig, source: Source, store: TokenStore, tokenizer: PreparedTokenizer, cache: Cache
) -> PreparedSource:
    """The sequences of a source, over its tokens."""
    length, mask = data.sequence_length, data.mask_documents
    views: dict[str, Samples]
    if data.packing == "concat":
        key, made = key_of(store.key, "concat", length), store.made
        views = {split: ConcatSamples(store.streams[split], length, mask) for split in SPLITS}
    else:
        key = key_of(store.key, data.packing, length, packing.FORMAT)

        def build(folder: Path) -> dict[str, Any]:
            with cache.progress.task(f"Packing {source.name}"):
                return packing.pack(folder, store, length)

        entry = cache.entry("packs", key, build)
        made = store.made or entry.made
        views = {
            split: packed_samples(entry.path, entry.meta, split, store.streams[split], length, mask, tokenizer.eos_id)
            for split in SPLITS
        }
    return PreparedSource(source.name, source.weight, key, store, views["train"], views["eval"], made)


def _check_vocabulary(recipe: Recipe, tokenizer: PreparedTokenizer) -> None:
    rows = recipe.vocab_size
    if rows is not None and tokenizer.vocab_size > rows:
        message = f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model's vocabulary only {rows:,}"
        raise DataError(Problem("data.vocab", FIELD, message, f"--set model.config.vocab_size={tokenizer.vocab_size}"))


def _check_evaluation(recipe: Recipe, prepared: Prepared) -> None:
    if recipe.evaluation.every_steps and not prepared.eval_sequences:
        documents = sum(len(source.store.streams["train"].documents) - 1 for source in prepared.sources)
        message = f"{recipe.data.eval_fraction} held out none of the {documents:,} documents, or too little to evaluate"
        fix = "raise it, give more documents (a text file is one document), or --set evaluation.every_steps=0"
        raise DataError(Problem("data.eval", "data.eval_fraction", message, fix))
