"""The documents of a sequence, read from the tokens on disk for the reference.

`llmtrain.data` reads sequences as matrices of tokens, positions and shifted labels. This module reads the same parts of
the stream one document at a time, so that an error in positions or labels shows. Both share the tokens, the document
boundaries, the packing, and the order of the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from llmtrain.recipe import DataConfig
from llmtrain.verify.reference import NO_TARGET, ReferenceDocument, join


def read_documents(samples: Any, number: int, data: DataConfig, padding: int) -> list[ReferenceDocument]:
    """Returns the documents of sequence `number` of `samples`, and its padding as another one.

    samples: as in `llmtrain.data.samples`. If the recipe does not mask documents, returns a single document.
    """
    found = []
    for begin, end in _pieces(samples, number, data):
        first, last = np.searchsorted(samples.stream.documents, np.array([begin + 1, end], np.uint64))
        inside = samples.stream.documents[first:last].tolist()
        for first, last in zip([begin, *inside], [*inside, end], strict=True):
            tokens = torch.from_numpy(np.asarray(samples.stream.tokens[first : last + 1], dtype=np.int64))
            targets = tokens[1:].clone()
            if samples.stream.trained is not None:
                targets[torch.from_numpy(~samples.stream.trained[first + 1 : last + 1])] = NO_TARGET
            pair = None
            if samples.stream.holds_pairs:
                number_in_stream = int(np.searchsorted(samples.stream.documents, np.uint64(first)))
                pair = number_in_stream // 2, number_in_stream % 2 == 1
            found.append(ReferenceDocument(tokens[:-1], targets, pair))
    missing = data.sequence_length - sum(len(one.inputs) for one in found)
    if missing:
        found.append(ReferenceDocument(torch.full((missing,), padding), torch.full((missing,), NO_TARGET)))
    return found if data.keeps_apart else [join(found)]


def _pieces(samples: Any, number: int, data: DataConfig) -> Iterator[tuple[int, int]]:
    """Yields the ranges of a sequence's inputs in the stream."""
    if data.packing == "concat":
        yield number * data.sequence_length, (number + 1) * data.sequence_length
        return
    for piece in range(int(samples.offsets[number]), int(samples.offsets[number + 1])):
        begin = int(samples.starts[piece])
        yield begin, begin + int(samples.lengths[piece])
