"""Turns a recipe into sequences on disk: tokenizer, tokens and packing, each made once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.data.arrays import compare
from llmtrain.data.cache import Cache, NotPreparedError, cache_folder, key_of
from llmtrain.data.chat.template import ChatTemplate, load_template
from llmtrain.data.chat.tokenize import ChatOptions
from llmtrain.data.images import ImageProcessor, image_processor
from llmtrain.data.order import integer_weights
from llmtrain.data.progress import Progress
from llmtrain.data.samples import (
    PACKING_FORMAT,
    ConcatSamples,
    EvalOrder,
    Samples,
    pack_documents,
    packed_samples,
)
from llmtrain.data.sources.corpus import SPLITS, ConversationCorpus, Corpus, open_corpora
from llmtrain.data.store import TokenStore
from llmtrain.data.tokenize import TokenizeOptions, token_store
from llmtrain.data.tokenizer import FIELD, Encoder, PreparedTokenizer, prepare_tokenizer
from llmtrain.errors import DataError, Problem, UserError
from llmtrain.plan.facts.model_facts import family_of, pretrained_vocabulary
from llmtrain.plan.facts.pretrained_config import declared_config
from llmtrain.plan.rules.model import packed_conversations
from llmtrain.recipe import DataConfig, Recipe, Source
from llmtrain.system.streams import short_names
from llmtrain.system.untrusted import file_fault

EVAL_FIELD = "evaluation.sources"
MAIN_SET = ""
"""Name of the evaluation set that has none: `evaluation.sources`, or the held-out documents."""


@dataclass(frozen=True)
class PreparedSource:
    """The sequences of one source."""

    name: str
    """The name in the recipe, extended if several sources have the same name."""
    weight: float
    """Weight in training, relative to the other sources."""
    key: str
    """Identifies the content: corpus, tokenizer, split, packing and sequence length."""
    store: TokenStore
    train: Samples
    eval: Samples
    made: bool
    """Whether this call made the tokens or the packing."""
    folders: tuple[Path, ...]
    """The folders of the tokens, and of the packing if there is one."""


@dataclass(frozen=True)
class Prepared:
    """Everything that training reads, ready on this machine."""

    tokenizer: PreparedTokenizer
    sources: tuple[PreparedSource, ...]
    """The training sources."""
    evaluation_sources: tuple[PreparedSource, ...]
    """Sources for evaluation only; if there are any, no training data are held out."""
    sequence_length: int
    """T, the length of a sequence in tokens."""
    made: bool
    """Whether this call made anything; False if everything was in the cache."""
    seconds: float
    """Duration of this call, including the time spent waiting for another process."""
    chat_template: ChatTemplate | None = None
    """The template that writes the conversations; None if there are none."""
    images: ImageProcessor | None = None
    """Makes the input of the vision tower; None if the model reads texts only."""
    sets: Mapping[str, tuple[PreparedSource, ...]] = field(default_factory=dict)
    """The sources of further evaluation sets, by name."""

    @property
    def key(self) -> str:
        """Identifies all that is read and its proportions.

        Equal keys and seeds give equal batches at equal positions.
        """
        weights = integer_weights([source.weight for source in self.sources])
        return key_of([source.key for source in self.sources], weights)

    @property
    def tokenizer_dir(self) -> Path:
        """Folder for `AutoTokenizer.from_pretrained`."""
        return self.tokenizer.folder

    @property
    def vocab_size(self) -> int:
        """Highest token id plus one."""
        return self.tokenizer.vocab_size

    @property
    def eos_id(self) -> int:
        """The token that ends each document, and pads."""
        return self.tokenizer.eos_id

    @property
    def stop_ids(self) -> list[int]:
        """The tokens at which generation stops: the end of a text, and of a turn of the assistant."""
        chats = [source.store.meta.get("conversations", {}) for source in self.sources]
        return sorted({self.eos_id, *(int(token) for chat in chats for token in chat.get("ends", ()))})

    @property
    def all_sources(self) -> tuple[PreparedSource, ...]:
        """The sources for training and for evaluation."""
        return (*self.sources, *self.evaluation_sources, *chain(*self.sets.values()))

    @property
    def train_sequences(self) -> int:
        """Number of training sequences in one pass over the data."""
        return sum(len(source.train) for source in self.sources)

    def evaluated(self, name: str = MAIN_SET) -> tuple[PreparedSource, ...]:
        """Returns the sources of a set whose `eval` has sequences to evaluate on."""
        sources = self.sets[name] if name else self.evaluation_sources or self.sources
        return tuple(source for source in sources if len(source.eval))

    def eval_sequences(self, name: str = MAIN_SET) -> int:
        """Returns the number of evaluation sequences of a set."""
        return sum(len(source.eval) for source in self.evaluated(name))

    def eval_order(self, name: str = MAIN_SET) -> EvalOrder:
        """Returns the order of the sequences of `evaluated`."""
        sources = self.evaluated(name)
        return EvalOrder([source.eval for source in sources], [source.key for source in sources])

    def unigram_loss(self, max_sequences: int | None = None) -> float:
        """Returns the mean cross-entropy (nats per token) of a unigram model on the evaluation targets.

        Its probabilities are the token counts of the training split, each plus one. Any model that has learned
        something is better. NaN without evaluation sequences.
        """
        counts = np.add.reduce([source.store.counts() for source in self.sources]) + 1
        loss = -np.log(counts / counts.sum())
        total, targets = 0.0, 0
        for rows in self.eval_order().read(max_sequences):
            labels = rows.labels[rows.labels >= 0]
            total += float(loss[labels].sum())
            targets += labels.size
        return total / targets if targets else float("nan")


def prepare(recipe: Recipe, progress: Progress | None = None) -> Prepared:
    """Makes what the recipe's data needs, or finds it in the cache.

    Any number of processes may call this at the same time: one makes each part, the others wait and open it. A call
    that finds everything reads no corpus, and imports neither `datasets` nor `torch`.

    Raises DataError for sources or a tokenizer that cannot be used, texts of special tokens, a tokenizer larger than
    the model's vocabulary, an empty corpus, and a cache that is full or cannot be written.
    """
    return _prepare(recipe, Cache(cache_folder(recipe.data), progress or Progress()))


def verify_prepared(prepared: Prepared, progress: Progress) -> int:
    """Reads all prepared data, and returns the number of bytes that are as they were written.

    Training itself compares what it reads, when it first reads it. Raises DataError with every file that has changed.
    """
    folders = dict.fromkeys(folder for source in prepared.all_sources for folder in source.folders)
    total = sum(path.stat().st_size for folder in folders for path in folder.glob("*.bin"))
    done = 0
    with progress.task("Comparing the data with their hashes") as task:

        def on_read(size: int) -> None:
            nonlocal done
            done += size
            task.update(done / max(1, total), f"{done:,} bytes")

        problems = [problem for folder in folders for problem in compare(folder, on_read)]
    if problems:
        raise DataError(problems)
    return done


def find_prepared(recipe: Recipe) -> Prepared | None:
    """Returns what `prepare` would open if all of it is in the cache, else None. Makes nothing."""
    try:
        return _prepare(recipe, Cache(cache_folder(recipe.data), Progress(), read_only=True))
    except (NotPreparedError, UserError):
        return None


def _prepare(recipe: Recipe, cache: Cache) -> Prepared:
    try:
        return _prepare_all(recipe, cache)
    except OSError as error:  # for example, a folder on the path to a file is not accessible
        raise DataError(
            Problem("data.read", str(error.filename or "data"), f"cannot be used: {file_fault(error)}")
        ) from error


def _prepare_all(recipe: Recipe, cache: Cache) -> Prepared:
    started = time.perf_counter()
    data, held_out = recipe.data, recipe.held_out_fraction
    corpora = _open(recipe, data.sources, cache, "data.sources")
    declared = {MAIN_SET: recipe.evaluation.sources, **recipe.evaluation.sets}
    eval_corpora = {name: _open(recipe, listed, cache, _eval_field(name)) for name, listed in declared.items()}
    tokenizer = prepare_tokenizer(data, corpora, held_out, cache, recipe.model.new_tokens)
    _check_vocabulary(recipe, tokenizer)
    chat = _chat_options(recipe, [*corpora, *chain(*eval_corpora.values())], tokenizer)
    options = TokenizeOptions(tokenizer, data.special_tokens, held_out, chat, tuple(recipe.objective.columns))
    sources = _prepare_sources(data, "data.sources", data.sources, corpora, options, cache)
    if recipe.train.epochs:
        sources = tuple(replace(source, weight=max(1, len(source.train))) for source in sources)
    options = replace(options, eval_fraction=1.0)
    sets = {
        name: _prepare_sources(data, _eval_field(name), listed, eval_corpora[name], options, cache)
        for name, listed in declared.items()
    }
    made = tokenizer.made or any(source.made for source in (*sources, *chain(*sets.values())))
    template, seconds = chat.template if chat else None, time.perf_counter() - started
    evaluation = sets.pop(MAIN_SET)
    images = _image_processor(recipe, tokenizer)
    prepared = Prepared(tokenizer, sources, evaluation, data.sequence_length, made, seconds, template, images, sets)
    _check_evaluation(recipe, prepared)
    return prepared


def _eval_field(name: str) -> str:
    return f"evaluation.sets.{name}" if name else EVAL_FIELD


def _open(recipe: Recipe, sources: Sequence[Source], cache: Cache, field: str) -> list[Corpus]:
    """Returns the opened corpora of a field, in the form in which the objective reads them."""
    if recipe.objective.reads_completions:
        sources = [source.model_copy(update={"format": recipe.objective.formats[1]}) for source in sources]
    drops_faulty, columns = recipe.data.faulty_rows == "drop", tuple(recipe.objective.columns)
    return open_corpora(sources, cache, field, recipe.code_dir, drops_faulty, columns)


def _chat_options(recipe: Recipe, corpora: Sequence[Corpus], tokenizer: PreparedTokenizer) -> ChatOptions | None:
    """Returns how conversations are read; None if there are none."""
    data = recipe.data
    if not any(isinstance(corpus, ConversationCorpus) for corpus in corpora):
        return None
    if data.packing == "concat":
        message = "`concat` cuts sequences anywhere, but a conversation is never split"
        raise DataError(Problem("data.packing", "data.packing", message, "--set data.packing=best_fit"))
    if data.packing == "best_fit" and (faults := list(packed_conversations(family_of(recipe.model)))):
        raise DataError(
            [Problem("data.conversations_mixed", fault.field, fault.message, fault.fix) for fault in faults]
        )
    template = load_template(data.chat_template, tokenizer.folder)
    images = _image_processor(recipe, tokenizer)
    return ChatOptions(template, data.train_on, data.too_long, data.faulty_rows, data.sequence_length, images)


def _image_processor(recipe: Recipe, tokenizer: PreparedTokenizer) -> ImageProcessor | None:
    """Returns what makes the input of the vision tower of a recipe's model; None if it reads texts only."""
    if not recipe.model.images:
        return None
    return image_processor(recipe.model, *declared_config(recipe.model), Encoder(tokenizer.folder))


def _prepare_sources(
    data: DataConfig,
    field: str,
    declared: Sequence[Source],
    corpora: Sequence[Corpus],
    options: TokenizeOptions,
    cache: Cache,
) -> tuple[PreparedSource, ...]:
    """Prepares every source of a field, and raises all faults together."""
    sources: list[PreparedSource] = []
    problems: list[Problem] = []
    names = unique_names(declared)
    for number, (source, corpus) in enumerate(zip(declared, corpora, strict=True)):
        try:
            store = token_store(corpus, f"{field}.{number}.name", options, cache)
            sources.append(packed_source(data, names[number], source.weight, store, options.tokenizer, cache))
        except DataError as error:
            problems += error.problems
            if any(problem.rule in ("data.disk", "data.cache") for problem in error.problems):
                break  # the next source would fail in the same way
    if problems:
        raise DataError(problems)
    return tuple(sources)


def unique_names(sources: Sequence[Source]) -> list[str]:
    """Returns a unique name for each source."""
    plain = [source.name for source in sources]
    full = [
        " ".join(filter(None, (source.name, source.subset, source.split, source.text_column))) for source in sources
    ]
    names: list[str] = []
    for number, name in enumerate(plain):
        if plain.count(name) > 1:
            name = full[number] if full.count(full[number]) == 1 else f"{full[number]} #{number}"
        names.append(name)
    return names


def packed_source(
    data: DataConfig, name: str, weight: float, store: TokenStore, tokenizer: PreparedTokenizer, cache: Cache
) -> PreparedSource:
    """Returns the sequences of a source over its tokens."""
    length, mask = data.sequence_length, data.has_document_mask
    views: dict[str, Samples]
    folders: tuple[Path, ...]
    if data.packing == "concat":
        key, made, folders = key_of(store.key, "concat", length), store.made, (store.path,)
        views = {split: ConcatSamples(store.streams[split], length, mask) for split in SPLITS}
    else:
        key = key_of(store.key, data.packing, length, PACKING_FORMAT)

        def build(folder: Path) -> dict[str, Any]:
            with cache.progress.task(f"Packing {short_names([name])[name]}"):
                return pack_documents(folder, store, length, one_per_sequence=data.packing == "none")

        entry = cache.entry("packs", key, build)
        made, folders = store.made or entry.made, (store.path, entry.path)
        views = {
            split: packed_samples(entry.path, entry.meta, split, store.streams[split], length, mask, tokenizer.eos_id)
            for split in SPLITS
        }
    return PreparedSource(name, weight, key, store, views["train"], views["eval"], made, folders)


def _check_vocabulary(recipe: Recipe, tokenizer: PreparedTokenizer) -> None:
    """Raises DataError for a tokenizer with tokens beyond the model's embedding, or beyond the rows that are kept."""
    rows = recipe.vocab_size
    fix = f"--set model.config.vocab_size={tokenizer.vocab_size}"
    if rows is None and recipe.model.pretrained is not None:
        rows = pretrained_vocabulary(recipe.model)
        fix = (
            f"use the tokenizer of the pretrained model: --set data.tokenizer={recipe.model.pretrained}, or let the "
            """vocabulary grow: --set 'model.new_tokens=["TOKEN", ...]'"""
        )
    if rows is not None and tokenizer.vocab_size > rows:
        message = f"the tokenizer has {tokenizer.vocab_size:,} tokens, but the model's vocabulary has only {rows:,}"
        raise DataError(Problem("data.vocab", FIELD, message, fix))
    kept, known = recipe.model.kept_rows, tokenizer.known_size
    if kept is not None and known is not None and kept < min(known, pretrained_vocabulary(recipe.model) or known):
        message = f"{kept:,} rows are kept of the pretrained embedding, but the tokenizer already has {known:,} tokens"
        raise DataError(Problem("data.kept_rows", "model.kept_rows", message, f"--set model.kept_rows={known}"))


def _check_evaluation(recipe: Recipe, prepared: Prepared) -> None:
    if not recipe.evaluation.every_steps:
        return
    never = "--set evaluation.every_steps=0"
    separate_sets = [MAIN_SET, *prepared.sets] if prepared.evaluation_sources else [*prepared.sets]
    message = f"contain too little text for one sequence of {prepared.sequence_length:,} tokens"
    problems = [
        Problem("data.eval", _eval_field(name), message, f"add more text, or {never}")
        for name in separate_sets
        if not prepared.eval_sequences(name)
    ]
    if problems:
        raise DataError(problems)
    if prepared.eval_sequences():
        return
    splits = [source.store.meta["splits"] for source in prepared.sources]
    documents, held_out = (sum(split[name]["documents"] for split in splits) for name in SPLITS)
    message = (
        f"{recipe.data.eval_fraction} held out {held_out:,} of {documents + held_out:,} documents, which is "
        "too little to evaluate on"
    )
    fix = f"increase it, add more documents (a text file is one), set evaluation.sources, or {never}"
    raise DataError(Problem("data.eval", "data.eval_fraction", message, fix))
