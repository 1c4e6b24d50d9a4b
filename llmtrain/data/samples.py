"""Sequences of T tokens from a stream, cut from it or packed, and the fixed order of the evaluation sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.arrays import (
    concatenated_ranges,
    disable_readahead,
    open_array,
    prefetch_ranges,
    require_all_intact,
    require_intact,
)
from llmtrain.data.order import permutation_key, permute
from llmtrain.data.sources.corpus import Split
from llmtrain.data.store import Stream

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


class Samples(ABC):
    """The sequences of a split."""

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

    def prefetch_counts(self, index: NDArray[np.int64]) -> None:  # noqa: B027 - not every kind reads something
        """Starts reading from disk what `count_targets` of `index` needs, without waiting."""

    def count_examples(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of pairs, or of labelled completions, in each sequence of `index`; 0 for others."""
        return np.zeros(len(index), np.int64)

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
        return Rows(tokens[indices].astype(np.int64), positions, tokens[indices + 1].astype(np.int64))

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
        require_intact(self.offsets, index, index + 2)
        return (self.offsets[index + 1] - self.offsets[index]).astype(np.int64) // (2 if self.stream.holds_pairs else 1)

    @cached_property
    def most_segments(self) -> int:
        """The largest number of segments of a sequence."""
        require_all_intact(self.offsets)
        return int(np.diff(self.offsets).max(initial=0))

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
        if not self.of_completions:
            return Rows(inputs, positions, labels)
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
        return Rows(inputs, positions, labels, segment_ids, references, desirable)


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


def empty_rows(rows: int, sequence_length: int, pad_id: int, conversations: int = 0) -> Rows:
    """Returns rows of padding, without targets; for completions, with room for this many conversations in each."""
    shape = (rows, sequence_length)
    positions = np.tile(np.arange(sequence_length), (rows, 1))
    empty = Rows(np.full(shape, pad_id, np.int64), positions, np.full(shape, NO_TARGET, np.int64))
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
