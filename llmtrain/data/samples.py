"""Sequences of T tokens from a stream, cut from it or packed, and the fixed order of the evaluation sequences.

Best-fit packing splits no document of at most T tokens, and leaves almost no slot empty (Ding et al., "Fewer
Truncations Improve Language Modeling", arXiv 2404.10830). A document of n + 1 tokens has n inputs, each with a label.
Documents of more than T inputs are cut into segments of T. The segments are sorted by decreasing length, and each goes
to the fullest sequence in which it fits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.arrays import (
    ArrayWriter,
    concatenated_ranges,
    disable_readahead,
    open_array,
    prefetch_ranges,
    require_all_intact,
    require_intact,
)
from llmtrain.data.order import permutation_key, permute
from llmtrain.data.sources.corpus import SPLITS, Split
from llmtrain.data.store import Stream, TokenStore

NO_TARGET = -100
"""Label of a position without a target, which `torch.nn.functional.cross_entropy` ignores by default."""


class Rows(NamedTuple):
    """Sequences, one per row; each array is [rows, T], int64."""

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    """The target of the input at the same position, already shifted; `NO_TARGET` if there is none."""
    segment_ids: NDArray[np.int64] | None = None
    """For an objective of completions, the index of each token's conversation in its row. The chosen one of a pair
    comes first."""
    references: NDArray[np.float64] | None = None
    """Likewise, [rows, conversations]: the log-probability of each completion under the reference; NaN if it is
    unknown, 0 beyond the last conversation of a row."""
    desirable: NDArray[np.bool_] | None = None
    """Likewise, [rows, conversations]: whether the completion is desirable, or chosen."""
    values: NDArray[np.float32] | None = None
    """[rows, T, columns]: the numbers that a user's own loss is given, of the document of each input; 0 in the padding.
    None without columns."""


class Samples(ABC):
    """The sequences of a split."""

    stream: Stream
    sequence_length: int
    """T, the length of a sequence in tokens."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def count_inputs(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of inputs, without padding, in each sequence of `index`."""

    @abstractmethod
    def count_targets(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of labels other than `NO_TARGET` in each sequence of `index`."""

    @abstractmethod
    def read(self, index: NDArray[np.int64]) -> Rows:
        """Reads the sequences of `index`."""

    def read_images(self, index: NDArray[np.int64]) -> list[list[tuple[int, bytes]]]:
        """Returns the encoded images of each sequence of `index`, with the column of the first image token of each."""
        return [[] for _ in index]

    def prefetch_counts(self, index: NDArray[np.int64]) -> None:  # noqa: B027 - not every kind reads something
        """Starts reading from disk what `count_targets` of `index` needs, without waiting."""

    def count_examples(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of pairs, or of labelled completions, in each sequence of `index`; 0 for others."""
        return np.zeros(len(index), np.int64)

    @property
    def of_completions(self) -> bool:
        """Whether the documents are pairs, or labelled completions."""
        return False

    def count_documents(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of documents, or segments of longer ones, in each sequence of `index`."""
        raise NotImplementedError("sequences are cut from a stream")

    def unused(self) -> int:
        """Returns the number of tokens in the stream that no sequence reads as input or target."""
        return 0


@dataclass(frozen=True)
class ConcatSamples(Samples):
    """Sequence i is tokens i·T to (i + 1)·T of the stream; the rest at its end, less than T, is not used."""

    stream: Stream
    sequence_length: int
    mask_documents: bool

    def __post_init__(self) -> None:
        disable_readahead(self.stream.documents)

    def __len__(self) -> int:
        return max(0, len(self.stream) - 1) // self.sequence_length

    def count_inputs(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns T for each sequence, since none has padding."""
        return np.full(len(index), self.sequence_length)

    def unused(self) -> int:
        """Returns the size of the rest at the end of the stream."""
        return len(self.stream) - (len(self) * self.sequence_length + 1 if len(self) else 0)

    def count_targets(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns T for each sequence, since every position has a target."""
        return np.full(len(index), self.sequence_length)

    def read(self, index: NDArray[np.int64]) -> Rows:
        """Reads the sequences of `index`; with `mask_documents`, positions restart at each document."""
        length = self.sequence_length
        prefetch_ranges(self.stream.tokens, index * length, (index + 1) * length + 1)
        indices = index[:, None] * length + np.arange(length)
        positions = np.tile(np.arange(length), (len(index), 1))
        if self.mask_documents:
            positions -= self._document_starts(index * length)
        tokens = self.stream.tokens
        require_intact(tokens, index * length, (index + 1) * length + 1)
        values = self.stream.values_at(indices) if self.stream.loss_columns else None
        return Rows(tokens[indices].astype(np.int64), positions, tokens[indices + 1].astype(np.int64), values=values)

    def _document_starts(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns where the document of each token of some windows begins, as an offset in its window, [windows, T].

        windows: the index in the stream of the first token of each window, [windows].
        """
        documents = self.stream.documents
        bounds = np.stack([windows, windows + self.sequence_length]).astype(np.uint64)
        first, end = np.searchsorted(documents, bounds, side="left")
        # A search is right if the items on both sides of its result are, whatever else it has compared.
        require_intact(documents, np.maximum(first - 1, 0), np.minimum(end + 1, len(documents)))
        starts = np.zeros((len(windows), self.sequence_length), np.int64)
        for row, (start, begin, stop) in enumerate(zip(windows.tolist(), first.tolist(), end.tolist(), strict=True)):
            inside = documents[begin:stop].astype(np.int64) - start
            starts[row, inside] = inside
        return np.maximum.accumulate(starts, axis=1)


@dataclass(frozen=True)
class PackedSamples(Samples):
    """Sequence i is segments offsets[i] to offsets[i + 1] of the index that `pack_documents` wrote, then padding.

    Positions of the padding start from 0, as if it were another document.
    """

    stream: Stream
    sequence_length: int
    mask_documents: bool
    pad_id: int
    starts: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    target_counts: NDArray[np.uint32]
    references: NDArray[np.float64] | None = None
    """[segments]: the log-probability of each completion under the reference; None if they are unknown."""
    desirable: NDArray[np.bool_] | None = None
    """[segments]: whether a labelled completion is desirable; None for others."""
    mismatched: PackedSamples | None = None
    """For labelled completions, sequences with the same prompts and the completions of others."""

    def __post_init__(self) -> None:
        if self.stream.loss_columns:
            disable_readahead(self.stream.documents)  # `values_at` searches in them

    def __len__(self) -> int:
        return len(self.target_counts)

    def count_inputs(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sums of the lengths of the sequences' segments."""
        before = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        first, end = self.offsets[index].astype(np.int64), self.offsets[index + 1].astype(np.int64)
        sizes: NDArray[np.int64] = before[end] - before[first]
        return sizes

    def prefetch_counts(self, index: NDArray[np.int64]) -> None:
        """Starts reading the target counts, each of which is on a page of its own in a large corpus."""
        prefetch_ranges(self.target_counts, index, index + 1)

    def count_targets(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of inputs with a target: all that are not padding, unless the stream says otherwise."""
        require_intact(self.target_counts, index, index + 1)
        return self.target_counts[index].astype(np.int64)

    @property
    def of_completions(self) -> bool:
        """Whether the segments are pairs, or labelled completions."""
        return self.stream.holds_pairs or self.desirable is not None

    def count_examples(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of pairs, or of labelled completions, in each sequence of `index`."""
        if not self.of_completions:
            return super().count_examples(index)
        return self.count_documents(index) // (2 if self.stream.holds_pairs else 1)

    def count_documents(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of segments in each sequence of `index`."""
        require_intact(self.offsets, index, index + 2)
        return (self.offsets[index + 1] - self.offsets[index]).astype(np.int64)

    @cached_property
    def most_segments(self) -> int:
        """The largest number of segments of a sequence."""
        require_all_intact(self.offsets)
        return int(np.diff(self.offsets).max(initial=0))

    def read_images(self, index: NDArray[np.int64]) -> list[list[tuple[int, bytes]]]:
        """Returns the encoded images of each sequence of `index`, with the column of the first image token of each."""
        images = self.stream.images
        if images is None:
            return super().read_images(index)
        rows = []
        for first, end in zip(self.offsets[index].tolist(), self.offsets[index + 1].tolist(), strict=True):
            row, before = [], 0
            for start, length in zip(self.starts[first:end].tolist(), self.lengths[first:end].tolist(), strict=True):
                row += [(before + column, image) for column, image in images.read(start, length)]
                before += length
            rows.append(row)
        return rows

    def read(self, index: NDArray[np.int64]) -> Rows:
        """Reads the sequences of `index`; with `mask_documents`, positions restart at each segment."""
        shape = (len(index), self.sequence_length)
        prefetch_ranges(self.offsets, index, index + 2)
        require_intact(self.offsets, index, index + 2)
        first, end = self.offsets[index].astype(np.int64), self.offsets[index + 1].astype(np.int64)
        prefetch_ranges(self.starts, first, end)
        prefetch_ranges(self.lengths, first, end)
        require_intact(self.starts, first, end)
        require_intact(self.lengths, first, end)
        segment = concatenated_ranges(first, end - first)
        starts, lengths = self.starts[segment].astype(np.int64), self.lengths[segment].astype(np.int64)
        prefetch_ranges(self.stream.tokens, starts, starts + lengths + 1)
        token = concatenated_ranges(starts, lengths)
        # The segments fill a row from the left; the rest is padding.
        input_counts = self.count_targets(index)
        if self.stream.loss_mask is not None and len(index):  # then not every input has a target
            input_counts = np.add.reduceat(lengths, np.cumsum(end - first) - (end - first))
        filled = np.arange(self.sequence_length) < input_counts[:, None]
        inputs = np.full(shape, self.pad_id, np.int64)
        labels = np.full(shape, NO_TARGET, np.int64)
        require_intact(self.stream.tokens, starts, starts + lengths + 1)
        inputs[filled] = self.stream.tokens[token]
        labels[filled] = self.stream.tokens[token + 1]
        if self.stream.loss_mask is not None:
            prefetch_ranges(self.stream.loss_mask, starts, starts + lengths + 1)
            require_intact(self.stream.loss_mask, starts, starts + lengths + 1)
            labels[filled] = np.where(self.stream.loss_mask[token + 1], labels[filled], NO_TARGET)
        positions = np.tile(np.arange(self.sequence_length), (len(index), 1))
        if self.mask_documents:
            positions -= filled.sum(axis=1, keepdims=True)
            positions[filled] = concatenated_ranges(np.zeros_like(lengths), lengths)
        values = None
        if self.stream.loss_columns:
            values = np.zeros((*shape, len(self.stream.loss_columns)), np.float32)
            values[filled] = np.repeat(self.stream.values_at(starts), lengths, axis=0)
        if not self.of_completions:
            return Rows(inputs, positions, labels, values=values)
        segment_ids = np.zeros(shape, np.int64)
        segment_ids[filled] = np.repeat(concatenated_ranges(np.zeros_like(first), end - first), lengths)
        for array in (self.references, self.desirable):
            if array is not None:
                require_intact(array, first, end)
        references = np.zeros((len(index), self.most_segments))
        filled_segments = np.arange(self.most_segments) < (end - first)[:, None]
        references[filled_segments] = np.nan if self.references is None else self.references[segment]
        desirable = np.tile(np.arange(self.most_segments) % 2 == 0, (len(index), 1))
        if self.desirable is not None:
            desirable[filled_segments] = self.desirable[segment]
        return Rows(inputs, positions, labels, segment_ids, references, desirable, values)


def packed_samples(
    folder: Path, meta: dict[str, Any], split: Split, stream: Stream, sequence_length: int, mask: bool, pad_id: int
) -> PackedSamples:
    """Opens one split of the index that `pack_documents` wrote to a folder."""
    sequences, segments = meta[split]["sequences"], meta[split]["pieces"]
    labelled = stream.desirable is not None
    offsets = open_array(folder, f"{split}_offsets", np.uint64, sequences + 1)
    desirable = open_array(folder, f"{split}_desirable", np.bool_, segments) if labelled else None

    def opened(name: str, mismatched: PackedSamples | None = None) -> PackedSamples:
        return PackedSamples(
            stream,
            sequence_length,
            mask,
            pad_id,
            starts=open_array(folder, f"{name}_starts", np.uint64, segments),
            lengths=open_array(folder, f"{name}_lengths", np.uint32, segments),
            offsets=offsets,
            target_counts=open_array(folder, f"{name}_targets", np.uint32, sequences),
            desirable=desirable,
            mismatched=mismatched,
        )

    return opened(split, opened(f"{split}_mismatched") if labelled else None)


def fill_fraction(samples: Samples) -> float:
    """Returns the fraction of slots that are not padding; 0 without sequences."""
    slots = len(samples) * samples.sequence_length
    return int(samples.count_inputs(np.arange(len(samples))).sum()) / slots if slots else 0.0


def empty_rows(rows: int, sequence_length: int, pad_id: int, conversations: int = 0, columns: int = 0) -> Rows:
    """Returns rows of padding, without targets; for completions, with room for this many conversations in each.

    columns: number of those that the loss is given.
    """
    shape = (rows, sequence_length)
    positions = np.tile(np.arange(sequence_length), (rows, 1))
    values = np.zeros((*shape, columns), np.float32) if columns else None
    empty = Rows(np.full(shape, pad_id, np.int64), positions, np.full(shape, NO_TARGET, np.int64), values=values)
    if not conversations:
        return empty
    of_each = (rows, conversations)
    return empty._replace(
        segment_ids=np.zeros(shape, np.int64), references=np.zeros(of_each), desirable=np.zeros(of_each, np.bool_)
    )


READ_ROWS = 64


class EvalOrder:
    """All evaluation sequences of all sources, in an order in which every prefix is a fair sample.

    Sources alternate in proportion to their sequences, and the sequences of a source are permuted by its key (packing
    puts long documents first). No seed is involved: every run of a recipe evaluates on the same sequences.
    """

    def __init__(self, views: Sequence[Samples], keys: Sequence[str]) -> None:
        self._views = views
        sizes = [len(view) for view in views]
        position = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes if size] or [np.empty(0)])
        source = np.repeat(np.arange(len(sizes)), sizes)
        index = [
            permute(np.arange(size), size, permutation_key("eval", key))
            for size, key in zip(sizes, keys, strict=True)
            if size
        ]
        order = np.argsort(position, kind="stable")
        self.sources: NDArray[np.int64] = source[order]
        """[sequences]: the source of each sequence."""
        self.index: NDArray[np.int64] = np.concatenate([*index, np.empty(0, np.int64)])[order]
        """[sequences]: the index of each sequence within its source."""

    def __len__(self) -> int:
        return len(self.sources)

    def by_source(self, max_sequences: int | None = None) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yields each source with the indices of its sequences among the first `max_sequences` (default all)."""
        sources, index = self.sources[:max_sequences], self.index[:max_sequences]
        for number in range(len(self._views)):
            indices = index[sources == number]
            if indices.size:
                yield number, indices

    def read(self, max_sequences: int | None = None) -> Iterator[Rows]:
        """Reads the first `max_sequences` sequences (default all), in batches of one source at a time."""
        for number, indices in self.by_source(max_sequences):
            for start in range(0, len(indices), READ_ROWS):
                yield self._views[number].read(indices[start : start + READ_ROWS])


PACKING_FORMAT = 1
"""Version of the index format; part of its key."""
CHUNK_DOCUMENTS = 1_000_000
"""Number of documents that are packed together, which bounds the memory."""


class Segments(NamedTuple):
    """Segments of a token stream: segment i has the inputs tokens[starts[i] : starts[i] + lengths[i]]."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


def pack_documents(
    folder: Path, store: TokenStore, sequence_length: int, one_per_sequence: bool = False
) -> dict[str, Any]:
    """Writes the index of both splits of a store; returns the numbers of sequences and segments of each.

    one_per_sequence: whether each segment has a sequence of its own.
    """
    meta: dict[str, Any] = {}
    for split in SPLITS:
        with ExitStack() as stack:
            # Sequence i consists of the segments offsets[i] to offsets[i + 1].
            offsets = stack.enter_context(ArrayWriter(folder, f"{split}_offsets", np.uint64))
            offsets.append(np.zeros(1, np.uint64))
            index = _SegmentWriter(folder, split, stack)
            stream = store.streams[split]
            labelled = stream.desirable is not None
            mismatched = _SegmentWriter(folder, f"{split}_mismatched", stack) if labelled else None
            desirable = stack.enter_context(ArrayWriter(folder, f"{split}_desirable", np.bool_)) if labelled else None
            for number in range(0, len(stream.documents) - 1, CHUNK_DOCUMENTS):
                last = min(number + CHUNK_DOCUMENTS + 1, len(stream.documents))
                require_intact(stream.documents, np.array([number]), np.array([last]))
                bounds = stream.documents[number:last].astype(np.int64)
                segments = cut_documents(bounds, sequence_length)
                trained = count_targets(stream, segments)
                order, sizes = _assign_to_sequences(segments, sequence_length, stream, one_per_sequence)
                ends = np.cumsum(sizes)
                offsets.append(index.starts.length + ends)
                if mismatched and desirable and stream.desirable is not None:
                    first = desirable.length
                    mismatched.add(segments, trained, 2 * order + 1, ends - sizes)
                    require_intact(stream.desirable, first + order, first + order + 1)
                    desirable.append(stream.desirable[first + order])
                    order = 2 * order
                index.add(segments, trained, order, ends - sizes)
            meta[split] = {"sequences": index.targets.length, "pieces": index.starts.length}
    return meta


class _SegmentWriter:
    """Writes the segments of sequences."""

    def __init__(self, folder: Path, name: str, stack: ExitStack) -> None:
        self.starts = stack.enter_context(ArrayWriter(folder, f"{name}_starts", np.uint64))
        self.lengths = stack.enter_context(ArrayWriter(folder, f"{name}_lengths", np.uint32))
        self.targets = stack.enter_context(ArrayWriter(folder, f"{name}_targets", np.uint32))

    def add(
        self, segments: Segments, trained: NDArray[np.int64], order: NDArray[np.int64], firsts: NDArray[np.int64]
    ) -> None:
        """Appends segments in the given order. firsts: the positions in it at which sequences begin."""
        self.starts.append(segments.starts[order])
        self.lengths.append(segments.lengths[order])
        self.targets.append(np.add.reduceat(trained[order], firsts))


def count_targets(stream: Stream, segments: Segments) -> NDArray[np.int64]:
    """Returns the number of inputs of each segment that have a label, [segments]."""
    if stream.loss_mask is None or not len(segments.starts):
        return segments.lengths
    first, last = segments.starts[0], segments.starts[-1] + segments.lengths[-1]
    require_intact(stream.loss_mask, np.array([first]), np.array([last + 1]))
    before = np.concatenate([[0], np.cumsum(stream.loss_mask[first : last + 1], dtype=np.int64)])
    target = segments.starts - first + 1
    counts: NDArray[np.int64] = before[target + segments.lengths] - before[target]
    return counts


def cut_documents(bounds: NDArray[np.int64], sequence_length: int) -> Segments:
    """Returns the segments of the documents between `bounds`, in order.

    Consecutive segments of a document overlap by one token, the last target of the first segment.
    """
    inputs = np.diff(bounds) - 1
    segments = -(-inputs // sequence_length)
    document = np.repeat(np.arange(len(inputs)), segments)
    number = np.arange(len(document)) - np.repeat(np.cumsum(segments) - segments, segments)
    offset = number * sequence_length
    return Segments(bounds[document] + offset, np.minimum(sequence_length, inputs[document] - offset))


def _assign_to_sequences(
    segments: Segments, capacity: int, stream: Stream, one_per_sequence: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns what `best_fit` returns, with both segments of a pair adjacent and in one bin.

    A labelled conversation and its mismatched one count as one segment of the length of the longer one: two sequences
    have the same layout, one with the labelled conversations and one with the mismatched ones. one_per_sequence:
    whether a bin has only one segment or pair.
    """
    together = 2 if stream.holds_pairs else 1
    units = segments.lengths.reshape(-1, together).sum(axis=1)
    if stream.desirable is not None:
        units = segments.lengths.reshape(-1, 2).max(axis=1)
    order, sizes = (
        (np.arange(len(units)), np.ones(len(units), np.int64)) if one_per_sequence else best_fit(units, capacity)
    )
    return (order[:, None] * together + np.arange(together)).ravel(), sizes * together


def best_fit(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Packs segments of lengths 1 to `capacity` into bins, best-fit decreasing.

    Returns the segments ordered by bin, and the number of segments in each bin.
    """
    full = np.flatnonzero(lengths == capacity)
    partial = np.flatnonzero(lengths < capacity)
    partial = partial[np.argsort(-lengths[partial], kind="stable")]
    bins = _fill_bins(partial.tolist(), lengths[partial].tolist(), capacity)
    order = np.concatenate([full, np.array([segment for segments in bins for segment in segments], np.int64)])
    sizes = np.concatenate([np.ones(len(full), np.int64), np.array([len(segments) for segments in bins], np.int64)])
    return order, sizes


def _fill_bins(segments: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """Returns the segments of each bin; `segments` must be sorted by decreasing length."""
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)  # remaining room → bins
    rooms: list[int] = []  # the keys of `with_room`, sorted
    for segment, length in zip(segments, lengths, strict=True):
        index = bisect_left(rooms, length)
        if index < len(rooms):
            room = rooms[index]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[index]
            bins[chosen].append(segment)
        else:
            room, chosen = capacity, len(bins)
            bins.append([segment])
        room -= length
        if room:
            if room not in with_room:
                insort(rooms, room)
            with_room[room].append(chosen)
    return bins
