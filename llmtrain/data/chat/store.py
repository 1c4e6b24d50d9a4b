"""Stores the tokens of conversations and the mask of trained tokens, in the disk layout of `llmtrain.data.store`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from llmtrain.data.arrays import ArrayWriter
from llmtrain.data.chat.conversation import Conversation, Layout, PromptWithCompletions, RowError
from llmtrain.data.chat.encode import ChatEncoder, Encoded, RenderedChat, TrainOn
from llmtrain.data.chat.template import ChatTemplate
from llmtrain.data.prefetch import prefetched
from llmtrain.data.progress import Task
from llmtrain.data.sources.corpus import ConversationCorpus, held_out
from llmtrain.data.sources.formats import Document
from llmtrain.data.sources.special import SpecialTokenCounter
from llmtrain.errors import DataError, Problem
from llmtrain.plan.facts.template_limits import limited_templates

FORMAT = 9
"""Version of the conversion of conversations to tokens; part of a store's key."""
BATCH_CONVERSATIONS = 1000
SHOWN = 5
"""Number of faulty rows that an error message shows."""
SPLITS = ("train", "eval")


@dataclass(frozen=True)
class ChatOptions:
    """The settings that determine how conversations become tokens."""

    template: ChatTemplate
    train_on: TrainOn
    too_long: Literal["drop", "cut_turns"]
    faulty_rows: Literal["refuse", "drop"]
    sequence_length: int

    def key(self) -> list[Any]:
        """Returns values that identify these settings."""
        return ["chat", FORMAT, *asdict(self).values()]


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
        self.faulty += 1
        if len(self.faults) < SHOWN:
            self.faults.append(f"{place}: {error}")


class _ChatRow(NamedTuple):
    """Conversations that belong together.

    Either one conversation, or the chosen and the rejected one of a pair, or a labelled one followed by its prompt with
    a completion of another row (`_mismatched`).
    """

    document: Document
    texts: list[RenderedChat | RowError]
    desirable: bool | None = None
    """Whether a labelled conversation is desirable; None for other conversations."""


class _Writer:
    """Writes the conversations of one split."""

    def __init__(self, folder: Path, split: str, vocab_size: int, labelled: bool, stack: ExitStack) -> None:
        self.dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        self._tokens = stack.enter_context(ArrayWriter(folder, f"{split}_tokens", self.dtype))
        self._trained = stack.enter_context(ArrayWriter(folder, f"{split}_trained", np.bool_))
        self._documents = stack.enter_context(ArrayWriter(folder, f"{split}_documents", np.uint64))
        self._documents.append(np.zeros(1, np.uint64))
        self.desirable = stack.enter_context(ArrayWriter(folder, f"{split}_desirable", np.bool_)) if labelled else None
        self.counts = np.zeros(vocab_size, np.int64)

    def add(self, kept: Sequence[tuple[Encoded, int]]) -> None:
        """Appends conversations. kept: each conversation with the number of its first tokens to write."""
        if not kept:
            return
        tokens = np.concatenate([encoded.ids[:size] for encoded, size in kept])
        self._documents.append(np.cumsum([size for _, size in kept]) + self._tokens.length)
        self._tokens.append(tokens)
        self._trained.append(np.concatenate([encoded.loss_mask[:size] for encoded, size in kept]))
        self.counts += np.bincount(tokens, minlength=len(self.counts))

    def summary(self) -> dict[str, int]:
        return {"documents": self._documents.length - 1, "tokens": self._tokens.length}


def tokenize_conversations(
    folder: Path,
    corpus: ConversationCorpus,
    place: str,
    *,
    options: ChatOptions,
    encoder: ChatEncoder,
    counter: SpecialTokenCounter,
    eval_fraction: float,
    vocab_size: int,
    task: Task,
) -> dict[str, Any]:
    """Writes both splits of a store in one pass over the corpus; returns its metadata.

    place: the recipe field of the source. Raises DataError for rows that cannot be trained on, unless faulty rows are
    dropped and others remain.
    """
    started, counts, characters = time.perf_counter(), _Counts(), 0
    row: Document | None = None
    is_faulty = False
    most, labelled = options.sequence_length + 1, corpus.chat.format == "unpaired_preference"
    with limited_templates(), ExitStack() as stack:
        writers = {split: _Writer(folder, split, vocab_size, labelled, stack) for split in SPLITS}
        # A thread reads and renders the next batch while the tokenizer works on the previous one.
        batches = prefetched(_batches(corpus, place, encoder, counter, counts))
        stack.callback(batches.close)
        for batch in batches:
            encoded = iter(encoder.tokenize([chat for chat_row in batch for chat in chat_row.texts]))
            kept: dict[str, list[tuple[Encoded, int]]] = {split: [] for split in SPLITS}
            for document, texts, desirable in batch:
                if document is not row:  # rows may have several labelled completions
                    row, is_faulty = document, False
                    counts.rows += 1
                    characters += len(row.text)
                results = [next(encoded) for _ in texts]
                conversations = [conversation for conversation in results if not isinstance(conversation, RowError)]
                if len(conversations) < len(results):
                    if not is_faulty:
                        counts.fault(
                            document.place,
                            next(conversation for conversation in results if isinstance(conversation, RowError)),
                        )
                    is_faulty = True
                elif sizes := _sizes(conversations, most, options.too_long, desirable):
                    counts.kept += 1
                    split = "eval" if held_out(document.text, eval_fraction) else "train"
                    kept[split] += zip(conversations, sizes, strict=True)
                    for conversation, size in zip(conversations, sizes, strict=True):
                        if desirable is not None and conversation is conversations[1]:
                            continue  # a mismatched conversation is not trained on
                        counts.cut += size < len(conversation.ids)
                        counts.trained_tokens += int(np.count_nonzero(conversation.loss_mask[1:size]))
                        for token in conversation.ends:
                            counts.ends[token] = counts.ends.get(token, 0) + 1
                    if labels := writers[split].desirable:
                        labels.append(np.array([desirable]))
                else:
                    counts.dropped += 1
            for split, writer in writers.items():
                writer.add(kept[split])
            task.update(batch[-1].document.fraction, f"{counts.rows:,} rows")
        stack.enter_context(ArrayWriter(folder, "train_counts", np.int64)).append(writers["train"].counts)
    if counts.faulty and (options.faulty_rows == "refuse" or not counts.kept):
        message = f"{counts.faulty:,} of {counts.rows:,} rows of '{corpus.name}' cannot be trained on:"
        lines = "".join(f"\n    {fault}" for fault in counts.faults)
        more = f"\n    and {counts.faulty - SHOWN:,} more" if counts.faulty > SHOWN else ""
        fix = "--set data.faulty_rows=drop leaves such rows out"
        raise DataError(Problem("data.conversations", place, message + lines + more, fix))
    return {
        "corpus": corpus.name,
        "dtype": writers["train"].dtype.name,
        "vocab_size": vocab_size,
        "splits": {split: writer.summary() for split, writer in writers.items()},
        "characters": characters,
        "special_tokens": asdict(counter.counts()),
        "conversations": asdict(counts) | {"ordinary_end": encoder.ordinary_end},
        "pairs": corpus.chat.format == "preference",
        "judged": labelled,  # the name in existing stores
        "seconds": time.perf_counter() - started,
    }


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
    fitting = [end for end in conversation.turns if end <= most and conversation.loss_mask[1:end].any()]
    return fitting[-1] if fitting and too_long == "cut_turns" else 0


def _batches(
    corpus: ConversationCorpus, place: str, encoder: ChatEncoder, counter: SpecialTokenCounter, counts: _Counts
) -> Iterator[list[_ChatRow]]:
    """Yields batches of documents with their rendered conversations."""
    layouts: dict[tuple[str, ...], Layout] = {}
    names: dict[tuple[str, ...], str] = {}
    labelled = corpus.chat.format == "unpaired_preference"

    def read(document: Document) -> PromptWithCompletions | tuple[Conversation, ...] | RowError:
        counter.count(document.text)
        row = document.row or json.loads(document.text)
        columns = tuple(row)
        try:
            if columns not in layouts:
                layouts[columns] = corpus.chat.layout(columns, place)
                names[columns] = str(layouts[columns])
            layout = layouts[columns]
            parsed = layout.read_completions(row) if labelled else layout.read(row)
        except RowError as error:
            return error
        except DataError as error:
            return RowError(str(error))
        description = names[columns]
        counts.columns[description] = counts.columns.get(description, 0) + 1
        for name in layout.unread(row):
            counts.unread[name] = counts.unread.get(name, 0) + 1
        return parsed

    documents = corpus.documents()
    carried: list[PromptWithCompletions] = []
    while batch := list(islice(documents, BATCH_CONVERSATIONS)):
        rows = [(document, read(document)) for document in batch]
        completions = [*carried, *(parsed for _, parsed in rows if isinstance(parsed, PromptWithCompletions))]
        number = len(carried) - 1
        chats: list[tuple[Document, list[Conversation | RowError], bool | None]] = []
        for document, parsed in rows:
            if isinstance(parsed, RowError):
                chats.append((document, [parsed], None))
            elif isinstance(parsed, tuple):
                chats.append((document, list(parsed), None))
            else:
                number += 1
                others = [
                    other if isinstance(other, RowError) else parsed.conversation(other)
                    for other in _mismatched(completions, number)
                ]
                for conversation, other, is_desirable in zip(
                    parsed.conversations, others, parsed.desirable, strict=True
                ):
                    chats.append((document, [conversation, other], is_desirable))
        texts = iter(
            encoder.render(
                [conversation for _, row, _ in chats for conversation in row if not isinstance(conversation, RowError)]
            )
        )
        rendered: list[_ChatRow] = []
        for document, row, desirable in chats:
            parts = [conversation if isinstance(conversation, RowError) else next(texts) for conversation in row]
            if desirable is not None and isinstance(parts[1], RowError) and not isinstance(row[1], RowError):
                parts[1] = RowError(f"with the completion of another row, {parts[1]}")
            rendered.append(_ChatRow(document, parts) if desirable is None else _ChatRow(document, parts, desirable))
        yield rendered
        carried = [candidate for candidate in completions if candidate.prompt != completions[-1].prompt][
            -1:
        ] + completions[-1:]


def _mismatched(rows: list[PromptWithCompletions], number: int) -> list[list[Any] | RowError]:
    """Returns, for each completion of a row, a completion of another row that answers a different prompt.

    The other row is the nearest earlier one, or the nearest later one for the first rows. The choice depends on the
    data alone, so the log-probabilities under the reference can be computed once.
    """
    row = rows[number]
    places = chain(range(number - 1, -1, -1), range(number + 1, len(rows)))
    other = next((rows[place] for place in places if rows[place].prompt != row.prompt), None)
    if other is None:
        return [RowError("no row near it has another prompt, but KTO also needs a completion of another prompt")] * len(
            row.completions
        )
    return [other.completions[place % len(other.completions)] for place in range(len(row.completions))]
