"""Best-fit packing: no document of at most T tokens is split, and almost no slot stays empty.

Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830. A document of n + 1 tokens has n inputs,
each with a label. Documents of more than T inputs are cut into segments of T. The segments are sorted by decreasing
length, and each goes to the fullest sequence in which it fits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.arrays import ArrayWriter, require_intact
from llmtrain.data.sources.corpus import SPLITS
from llmtrain.data.store import Stream, TokenStore

FORMAT = 1
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
