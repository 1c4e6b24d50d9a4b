"""The fixed order of the evaluation sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.permutation import permutation_key, permute
from llmtrain.data.samples import Rows, Samples

READ_ROWS = 64


class EvalOrder:
    """All evaluation sequences of all sources, in an order in which every prefix is a fair sample.

    Sources alternate in proportion to their sequences, and the sequences of a source are permuted by its key (packing
    puts long documents first). No seed is involved: every run of a recipe evaluates on the same sequences.
    """

    def __init__(self, views: Sequence[Samples], keys: Sequence[str]) -> None:
        self._views = views
        sizes = [len(view) for view in views]
        place = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes if size] or [np.empty(0)])
        source = np.repeat(np.arange(len(sizes)), sizes)
        index = [
            permute(np.arange(size), size, permutation_key("eval", key))
            for size, key in zip(sizes, keys, strict=True)
            if size
        ]
        order = np.argsort(place, kind="stable")
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
            mine = index[sources == number]
            if mine.size:
                yield number, mine

    def read(self, max_sequences: int | None = None) -> Iterator[Rows]:
        """Reads the first `max_sequences` sequences (default all), in batches of one source at a time."""
        for number, mine in self.by_source(max_sequences):
            for start in range(0, len(mine), READ_ROWS):
                yield self._views[number].read(mine[start : start + READ_ROWS])
