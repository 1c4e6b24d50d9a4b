"""Tokenizes conversations into a store, with the mask of trained tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from llmtrain.data.chat.conversation import Conversation, Layout, PromptWithCompletions, RowError
from llmtrain.data.chat.encode import ChatEncoder, Encoded, RenderedChat, TrainOn
from llmtrain.data.chat.template import ChatTemplate
from llmtrain.data.images import ImageProcessor, decode_image, read_image
from llmtrain.data.prefetch import prefetched
from llmtrain.data.progress import Task
from llmtrain.data.sources.corpus import SPLITS, ConversationCorpus, Split, held_out, row_counts
from llmtrain.data.sources.formats import Document
from llmtrain.data.sources.special import SpecialTokenCounter
from llmtrain.data.store import ImageWriter, StreamWriter, write_counts
from llmtrain.data.tokenizer import Encoder, PreparedTokenizer
from llmtrain.errors import DataError, Problem
from llmtrain.plan.facts.images import FIELD
from llmtrain.plan.facts.template_limits import limited_templates

FORMAT = 9
"""Version of the conversion of conversations to tokens; part of a store's key."""
BATCH_CONVERSATIONS = 1000
MAX_SHOWN = 5
"""Number of faulty rows that an error message shows."""


@dataclass(frozen=True)
class ChatOptions:
    """The settings that determine how conversations become tokens."""

    template: ChatTemplate
    train_on: TrainOn
    too_long: Literal["drop", "cut_turns"]
    faulty_rows: Literal["refuse", "drop"]
    sequence_length: int
    images: ImageProcessor | None = None
    """Reads their images; None if the model reads texts only."""

    def key(self) -> list[Any]:
        """Returns values that identify these settings."""
        settings = asdict(replace(self, images=None))
        del settings["images"]
        return ["chat", FORMAT, *settings.values(), *(self.images.key if self.images else [])]


@dataclass
class _Counts:
    """Statistics of a pass over the rows. `kept`, `dropped` and `cut` count pairs, or else conversations."""

    rows: int = 0
    faulty: int = 0
    """Number of rows with a fault in any of their conversations."""
    kept: int = 0
    dropped: int = 0
    cut: int = 0
    trained_tokens: int = 0
    faults: list[str] = field(default_factory=list)
    columns: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    """Column, or key of a message, that nothing reads → number of rows that have it."""
    ends: dict[int, int] = field(default_factory=dict)
    """Token that ends turns of the assistant → number of conversations in which it does."""

    def fault(self, place: str, error: Exception) -> None:
        """Counts a faulty row."""
        self.faulty += 1
        if len(self.faults) < MAX_SHOWN:
            self.faults.append(f"{place}: {error}")

    def count(self, conversations: Sequence[Encoded], sizes: Sequence[int], labelled: bool) -> None:
        """Counts an example, of which the first `sizes` tokens are kept, or which is dropped if there are no sizes."""
        if not sizes:
            self.dropped += 1
            return
        self.kept += 1
        trained = conversations[:1] if labelled else conversations  # a mismatched conversation is not trained on
        for conversation, size in zip(trained, sizes, strict=False):
            self.cut += size < len(conversation.ids)
            self.trained_tokens += int(np.count_nonzero(conversation.loss_mask[1:size]))
            for token in conversation.ends:
                self.ends[token] = self.ends.get(token, 0) + 1


class _Example(NamedTuple):
    """Conversations that are kept or dropped together.

    Either one conversation, or the chosen and the rejected one of a pair, or a labelled one followed by its prompt with
    a completion of another row (`_mismatched`).
    """

    document: Document
    chats: Sequence[RenderedChat | RowError]
    desirable: bool | None = None
    """Whether a labelled conversation is desirable; None for other conversations."""


class _ChatWriter(StreamWriter):
    """Writes the conversations of one split."""

    def __init__(
        self,
        folder: Path,
        split: Split,
        vocab_size: int,
        labelled: bool,
        stack: ExitStack,
        loss_columns: tuple[str, ...],
        with_images: bool,
    ) -> None:
        super().__init__(folder, split, vocab_size, stack, loss_columns)
        self._images = ImageWriter(self) if with_images else None
        self._buffered_tokens = 0
        self._trained = self.open("trained", np.bool_)
        self._desirable = self.open("desirable", np.bool_) if labelled else None
        self._buffer: list[tuple[Encoded, int]] = []
        self._buffered_values: list[tuple[float, ...]] = []

    def add(
        self,
        conversations: Sequence[Encoded],
        sizes: Sequence[int],
        desirable: bool | None,
        values: tuple[float, ...],
        images: Sequence[bytes] = (),
    ) -> None:
        """Appends an example. sizes: for each conversation, the number of its first tokens to write.

        values: those of its row, which each of its conversations has. images: those of its only conversation.
        """
        if self._images:
            for (first, end), image in zip(conversations[0].images, images, strict=True):
                if end <= sizes[0]:  # the last turns may be cut off
                    self._images.append(self.tokens + self._buffered_tokens + first, image)
            self._buffered_tokens += sizes[0]
        self._buffer += zip(conversations, sizes, strict=True)
        self._buffered_values += [values] * len(sizes)
        if self._desirable:
            self._desirable.append(np.array([desirable]))

    @property
    def image_counts(self) -> dict[str, int]:
        """The numbers of images, and of their bytes, that have been written."""
        assert self._images is not None, "the store has images"
        return self._images.counts

    def flush(self) -> None:
        """Writes the buffer to the files."""
        if self._buffer:
            self._trained.append(np.concatenate([encoded.loss_mask[:size] for encoded, size in self._buffer]))
            tokens = np.concatenate([encoded.ids[:size] for encoded, size in self._buffer])
            self.append(tokens, np.cumsum([size for _, size in self._buffer]) + self.tokens, self._buffered_values)
            self._buffer.clear()
            self._buffered_values.clear()
            self._buffered_tokens = 0


def tokenize_conversations(
    folder: Path,
    corpus: ConversationCorpus,
    field: str,
    *,
    options: ChatOptions,
    tokenizer: PreparedTokenizer,
    parse_special: bool,
    eval_fraction: float,
    loss_columns: tuple[str, ...],
    task: Task,
) -> dict[str, Any]:
    """Writes both splits of a store in one pass over the corpus; returns its metadata.

    field: the recipe field of the source. parse_special: as for `ChatEncoder`. loss_columns: `objective.columns`.
    Raises DataError for rows that cannot be trained on, unless faulty rows are dropped and others remain.
    """
    started, counts = time.perf_counter(), _Counts()
    encoder = ChatEncoder(tokenizer.folder, options.template, train_on=options.train_on, parse_special=parse_special)
    counter = SpecialTokenCounter(Encoder(tokenizer.folder).special_tokens())
    labelled = corpus.chat.format == "unpaired_preference"
    with limited_templates(), ExitStack() as stack:
        writers = {
            split: _ChatWriter(
                folder, split, tokenizer.vocab_size, labelled, stack, loss_columns, options.images is not None
            )
            for split in SPLITS
        }
        # A thread reads and renders the next batch while the tokenizer works on the previous one.
        batches = prefetched(_batches(corpus, field, encoder, counter, counts))
        stack.callback(batches.close)
        faulty_row: Document | None = None
        for examples in batches:
            encoded = iter(encoder.tokenize([chat for example in examples for chat in example.chats]))
            for document, chats, desirable in examples:
                results = [next(encoded) for _ in chats]
                images: list[bytes] = []
                if any(isinstance(chat, RenderedChat) and chat.conversation.images for chat in chats):
                    images, results = _with_images(document, chats[0], results[0], options.images, field)
                if error := next((result for result in results if isinstance(result, RowError)), None):
                    if document is not faulty_row:  # a row may have several labelled completions
                        counts.fault(document.place, error)
                    faulty_row = document
                    continue
                conversations = [result for result in results if isinstance(result, Encoded)]
                sizes = _sizes(conversations, options.sequence_length + 1, options.too_long, desirable)
                counts.count(conversations, sizes, labelled)
                if sizes:
                    split: Split = "eval" if held_out(document.text, eval_fraction) else "train"
                    writers[split].add(conversations, sizes, desirable, document.values, images)
            for writer in writers.values():
                writer.flush()
            task.update(examples[-1].document.fraction, str(row_counts(corpus) or f"{counts.rows:,} rows"))
    if counts.faulty and (options.faulty_rows == "refuse" or not counts.kept):
        message = f"{counts.faulty:,} of {counts.rows:,} rows of '{corpus.name}' cannot be trained on:"
        lines = "".join(f"\n    {fault}" for fault in counts.faults)
        more = f"\n    and {counts.faulty - MAX_SHOWN:,} more" if counts.faulty > MAX_SHOWN else ""
        fix = "--set data.faulty_rows=drop leaves such rows out"
        raise DataError(Problem("data.conversations", field, message + lines + more, fix))
    special = counter.counts()
    with_images = (
        {"images": {split: writer.image_counts for split, writer in writers.items()}} if options.images else {}
    )
    return {
        "corpus": corpus.name,
        **write_counts(folder, writers),
        "characters": special.characters,
        "special_tokens": asdict(special),
        "conversations": asdict(counts) | {"ordinary_end": encoder.ordinary_end},
        "pairs": corpus.chat.format == "preference",
        "judged": labelled,
        "seconds": time.perf_counter() - started,
        **with_images,
    }


def _with_images(
    document: Document,
    chat: RenderedChat | RowError,
    encoded: Encoded | RowError,
    processor: ImageProcessor | None,
    field: str,
) -> tuple[list[bytes], list[Encoded | RowError]]:
    """Returns the images of a conversation, and its tokens with theirs.

    Raises DataError if the model reads texts only: such rows are not dropped as faulty ones.
    """
    if processor is None:
        message = f"{document.place} has images, but the model reads texts only"
        fix = f"--set {FIELD}=true trains a multimodal model as a whole; a filter of the source may leave such rows out"
        raise DataError(Problem("data.images", field, message, fix))
    assert isinstance(chat, RenderedChat), "it has images"
    if isinstance(encoded, RowError):
        return [], [encoded]
    try:
        images = [read_image(image, document.folder) for image in chat.conversation.images]
        tokens = [processor.tokens(decode_image(image)) for image in images]
        return images, [encoded.with_images(processor.written, processor.token, tokens)]
    except RowError as fault:
        return [], [fault]


def _sizes(row: list[Encoded], most: int, too_long: str, desirable: bool | None) -> list[int]:
    """Returns the number of tokens to keep of each conversation of a row; empty if the row does not fit a sequence.

    The two conversations of a pair must fit into one sequence together, not counting the last token of each, which is
    not an input. A mismatched conversation is cut, because the length of another row's completion is no reason to drop
    this row.
    """
    if len(row) == 1:
        return [size] if (size := _size(row[0], most, too_long)) else []
    sizes = [len(conversation.ids) for conversation in row]
    if desirable is not None:
        return [sizes[0], min(sizes[1], most)] if sizes[0] <= most else []
    return sizes if sum(size - 1 for size in sizes) < most else []


def _size(conversation: Encoded, most: int, too_long: str) -> int:
    """Returns the number of tokens to keep of a conversation: all, those up to the last turn that fits, or 0."""
    if len(conversation.ids) <= most:
        return len(conversation.ids)
    fitting = [end for end in conversation.cuts if end <= most and conversation.loss_mask[1:end].any()]
    return fitting[-1] if fitting and too_long == "cut_turns" else 0


def _batches(
    corpus: ConversationCorpus, field: str, encoder: ChatEncoder, counter: SpecialTokenCounter, counts: _Counts
) -> Iterator[list[_Example]]:
    """Yields batches of documents with their rendered conversations."""
    layouts: dict[tuple[str, ...], Layout] = {}
    labelled = corpus.chat.format == "unpaired_preference"

    def read(document: Document) -> PromptWithCompletions | tuple[Conversation, ...] | RowError:
        counter.count(document.text)
        counts.rows += 1
        row = document.row or json.loads(document.text)
        columns = tuple(row)
        try:
            if columns not in layouts:
                layouts[columns] = corpus.chat.layout(columns, field)
            layout = layouts[columns]
            parsed = layout.read_completions(row) if labelled else layout.read(row)
        except (RowError, DataError) as error:
            return RowError(str(error))
        counts.columns[str(layout)] = counts.columns.get(str(layout), 0) + 1
        for name in layout.unread(row):
            counts.unread[name] = counts.unread.get(name, 0) + 1
        return parsed

    documents = corpus.documents()
    carried: list[PromptWithCompletions] = []
    """Rows of earlier batches, with the last two different prompts."""
    while batch := list(islice(documents, BATCH_CONVERSATIONS)):
        rows = [(document, read(document)) for document in batch]
        completions = [*carried, *(parsed for _, parsed in rows if isinstance(parsed, PromptWithCompletions))]
        number = len(carried) - 1
        examples: list[tuple[Document, Sequence[Conversation | RowError], bool | None]] = []
        for document, parsed in rows:
            if isinstance(parsed, PromptWithCompletions):
                number += 1
                pairs = zip(parsed.conversations, _mismatched(completions, number), strict=True)
                examples += [
                    (document, pair, desirable) for pair, desirable in zip(pairs, parsed.desirable, strict=True)
                ]
            else:
                examples.append((document, [parsed] if isinstance(parsed, RowError) else parsed, None))
        rendered = iter(encoder.render([chat for _, chats, _ in examples for chat in chats]))
        yield [
            _Example(document, [next(rendered) for _ in chats], desirable) for document, chats, desirable in examples
        ]
        others = [candidate for candidate in completions if candidate.prompt != completions[-1].prompt]
        carried = others[-1:] + completions[-1:]


def _mismatched(rows: list[PromptWithCompletions], number: int) -> list[Conversation | RowError]:
    """Returns the prompt of a row with a completion of another row, in place of each of its own completions.

    The other row is the nearest earlier one, or the nearest later one for the first rows. The choice depends on the
    data alone, so the log-probabilities under the reference can be computed once.
    """
    row = rows[number]
    nearest = chain(range(number - 1, -1, -1), range(number + 1, len(rows)))
    other = next((rows[index] for index in nearest if rows[index].prompt != row.prompt), None)
    if other is None:
        error = RowError("no row near it has another prompt, but KTO also needs a completion of another prompt")
        return [error] * len(row.completions)
    return [_combined(row, completion) for completion in islice(cycle(other.completions), len(row.completions))]


def _combined(row: PromptWithCompletions, completion: list[Any]) -> Conversation | RowError:
    try:
        return row.conversation(completion)
    except RowError as error:
        return RowError(f"with the completion of another row, it {error}")
