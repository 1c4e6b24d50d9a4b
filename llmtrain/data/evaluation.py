"""The fixed order of the sequences that are evaluated on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.permutation import permutation_key, permute
from llmtrain.data.samples import Rows, Samples

READ_ROWS = 64


class EvalOrder:
    """All sequences of all sources that are evaluated on, in an order of which every beginning is a fair sample.

    Sources alternate in proportion to their sequences, and those of a source are permuted by its
    key (packing puts long documents first). No seed takes part: every run of a recipe evaluates
    on the same sequences.
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
        """Source of each sequence."""
        self.index: NDArray[np.int64] = np.concatenate([*index, np.empty(0, np.int64)])[order]
        """Sequence within its source."""

    def __len__(self) -> int:
        return len(self.sources)

    def by_source(self, max_sequences: int | None = None) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The first `max_sequences` (default all): each source, and those of its sequences that are among them."""
        sources, index = self.sources[:max_sequences], self.index[:max_sequences]
        for number in range(len(self._views)):
            mine = index[sources == number]
            if mine.size:
                yield number, mine

    def read(self, max_sequences: int | None = None) -> Iterator[Rows]:
        """The first `max_sequences` (default all), some at a time, a source at a time."""
        for number, mine in self.by_source(max_sequences):
            for start in range(0, len(mine), READ_ROWS):
                yield self._views[number].read(mine[start : start + READ_ROWS])
