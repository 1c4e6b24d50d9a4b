"""Best-fit packing: no document of at most T tokens is split, and almost no slot stays empty.

Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830. A document of n + 1 tokens has n inputs,
each with a target. Documents of more than T inputs are cut into pieces of T; the pieces are placed by decreasing
length, each in the fullest sequence in which it fits.
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
from llmtrain.data.store import SPLITS, Stream, TokenStore

FORMAT = 1
"""Version of the index format; part of its key."""
CHUNK_DOCUMENTS = 1_000_000
"""Number of documents that are packed together, which bounds the memory."""


class Pieces(NamedTuple):
    """Pieces of a token stream: piece i has the inputs tokens[starts[i] : starts[i] + lengths[i]]."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


def pack_documents(folder: Path, store: TokenStore, sequence_length: int, alone: bool = False) -> dict[str, Any]:
    """Writes the index of both splits of a store; returns the numbers of sequences and pieces of each.

    alone: whether each piece has a sequence of its own.
    """
    meta: dict[str, Any] = {}
    for split in SPLITS:
        with ExitStack() as stack:
            # Sequence i consists of the pieces offsets[i] to offsets[i + 1].
            offsets = stack.enter_context(ArrayWriter(folder, f"{split}_offsets", np.uint64))
            offsets.append(np.zeros(1, np.uint64))
            index = _PieceWriter(folder, split, stack)
            stream = store.streams[split]
            labelled = stream.desirable is not None
            mismatched = _PieceWriter(folder, f"{split}_mismatched", stack) if labelled else None
            desirable = stack.enter_context(ArrayWriter(folder, f"{split}_desirable", np.bool_)) if labelled else None
            for number in range(0, len(stream.documents) - 1, CHUNK_DOCUMENTS):
                last = min(number + CHUNK_DOCUMENTS + 1, len(stream.documents))
                require_intact(stream.documents, np.array([number]), np.array([last]))
                bounds = stream.documents[number:last].astype(np.int64)
                pieces = cut_documents(bounds, sequence_length)
                trained = trained_of(stream, pieces)
                order, sizes = _placed(pieces, sequence_length, stream, alone)
                ends = np.cumsum(sizes)
                offsets.append(index.starts.length + ends)
                if mismatched and desirable and stream.desirable is not None:
                    first = desirable.length
                    mismatched.add(pieces, trained, 2 * order + 1, ends - sizes)
                    require_intact(stream.desirable, first + order, first + order + 1)
                    desirable.append(stream.desirable[first + order])
                    order = 2 * order
                index.add(pieces, trained, order, ends - sizes)
            meta[split] = {"sequences": index.targets.length, "pieces": index.starts.length}
    return meta


class _PieceWriter:
    """Writes the pieces of sequences."""

    def __init__(self, folder: Path, name: str, stack: ExitStack) -> None:
        self.starts = stack.enter_context(ArrayWriter(folder, f"{name}_starts", np.uint64))
        self.lengths = stack.enter_context(ArrayWriter(folder, f"{name}_lengths", np.uint32))
        self.targets = stack.enter_context(ArrayWriter(folder, f"{name}_targets", np.uint32))

    def add(
        self, pieces: Pieces, trained: NDArray[np.int64], order: NDArray[np.int64], firsts: NDArray[np.int64]
    ) -> None:
        """Appends pieces in the given order. firsts: the positions in it at which sequences begin."""
        self.starts.append(pieces.starts[order])
        self.lengths.append(pieces.lengths[order])
        self.targets.append(np.add.reduceat(trained[order], firsts))


def trained_of(stream: Stream, pieces: Pieces) -> NDArray[np.int64]:
    """Returns the number of inputs of each piece that have a target."""
    if stream.trained is None or not len(pieces.starts):
        return pieces.lengths
    first, last = pieces.starts[0], pieces.starts[-1] + pieces.lengths[-1]
    require_intact(stream.trained, np.array([first]), np.array([last + 1]))
    before = np.concatenate([[0], np.cumsum(stream.trained[first : last + 1], dtype=np.int64)])
    target = pieces.starts - first + 1
    counts: NDArray[np.int64] = before[target + pieces.lengths] - before[target]
    return counts


def cut_documents(bounds: NDArray[np.int64], sequence_length: int) -> Pieces:
    """Returns the pieces of the documents between `bounds`, in order.

    Consecutive pieces of a document overlap by one token, the last target of the first piece.
    """
    inputs = np.diff(bounds) - 1
    pieces = -(-inputs // sequence_length)
    document = np.repeat(np.arange(len(inputs)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = number * sequence_length
    return Pieces(bounds[document] + offset, np.minimum(sequence_length, inputs[document] - offset))


def _placed(pieces: Pieces, capacity: int, stream: Stream, alone: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Does the same as `best_fit`, with both pieces of a pair in one bin, in their order.

    A labelled conversation and its mismatched one are a single piece here, with the length of the longer one: the
    former go to one sequence, and the latter, in the same places, to another. alone: whether a bin holds only one piece
    or pair.
    """
    together = 2 if stream.holds_pairs else 1
    units = pieces.lengths.reshape(-1, together).sum(axis=1)
    if stream.desirable is not None:
        units = pieces.lengths.reshape(-1, 2).max(axis=1)
    order, sizes = (np.arange(len(units)), np.ones(len(units), np.int64)) if alone else best_fit(units, capacity)
    return (order[:, None] * together + np.arange(together)).ravel(), sizes * together


def best_fit(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Packs pieces of lengths 1 to `capacity` into bins, best-fit decreasing.

    Returns the pieces ordered by bin, and the number of pieces in each bin.
    """
    full = np.flatnonzero(lengths == capacity)
    partial = np.flatnonzero(lengths < capacity)
    partial = partial[np.argsort(-lengths[partial], kind="stable")]
    bins = _place(partial.tolist(), lengths[partial].tolist(), capacity)
    order = np.concatenate([full, np.array([piece for pieces in bins for piece in pieces], np.int64)])
    sizes = np.concatenate([np.ones(len(full), np.int64), np.array([len(pieces) for pieces in bins], np.int64)])
    return order, sizes


def _place(pieces: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """Returns the pieces of each bin; `pieces` must be sorted by decreasing length."""
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)  # remaining room → bins
    rooms: list[int] = []  # the keys of `with_room`, sorted
    for piece, length in zip(pieces, lengths, strict=True):
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
            bins[chosen].append(piece)
        else:
            room, chosen = capacity, len(bins)
            bins.append([piece])
        room -= length
        if room:
            if room not in with_room:
                insort(rooms, room)
            with_room[room].append(chosen)
    return bins
