"""The documents of a sequence, read from the tokens on disk for the reference.

`llmtrain.data` reads sequences as matrices of tokens, positions and shifted labels. This module reads the same parts of
the stream one document at a time, so that an error in positions or labels shows. Both share the tokens, the document
boundaries, the packing, and the order of the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from llmtrain.recipe import DataConfig
from llmtrain.trials.verify.reference import NO_TARGET, ReferenceDocument, join_documents


def read_documents(samples: Any, number: int, data: DataConfig, padding: int) -> list[ReferenceDocument]:
    """Returns the documents of sequence `number` of `samples`, and its padding as another one.

    samples: as in `llmtrain.data.samples`. If the recipe does not mask documents, returns a single document,
    unless its completions are labelled: then it is the only one before the padding.
    """
    documents = []
    for begin, end in _pieces(samples, number, data):
        first, last = np.searchsorted(samples.stream.documents, np.array([begin + 1, end], np.uint64))
        inside = samples.stream.documents[first:last].tolist()
        for first, last in zip([begin, *inside], [*inside, end], strict=True):
            document = _document(samples.stream, first, last)
            index = int(np.searchsorted(samples.stream.documents, np.uint64(first)))
            if samples.stream.holds_pairs:
                document = replace(document, pair=(index // 2, index % 2 == 1))
            if samples.stream.desirable is not None:
                start, stop = samples.stream.documents[index + 1 : index + 3].tolist()
                label = bool(samples.stream.desirable[index // 2])
                document = replace(document, desirable=label, mismatched=_document(samples.stream, start, stop - 1))
            documents.append(document)
    missing = data.sequence_length - sum(len(document.inputs) for document in documents)
    if missing:
        columns = len(samples.stream.loss_columns)
        values = torch.zeros(missing, columns) if columns else None
        targets = torch.full((missing,), NO_TARGET)
        documents.append(ReferenceDocument(torch.full((missing,), padding), targets, values=values))
    return documents if data.has_document_mask or samples.stream.desirable is not None else [join_documents(documents)]


def _document(stream: Any, begin: int, end: int) -> ReferenceDocument:
    """Returns the document with the inputs from `begin` to `end`, which is its last token or where it is cut."""
    tokens = torch.from_numpy(np.asarray(stream.tokens[begin : end + 1], dtype=np.int64))
    targets = tokens[1:].clone()
    if stream.loss_mask is not None:
        targets[torch.from_numpy(~stream.loss_mask[begin + 1 : end + 1])] = NO_TARGET
    return ReferenceDocument(tokens[:-1], targets, values=_values(stream, begin, end - begin))


def _values(stream: Any, begin: int, size: int) -> torch.Tensor | None:
    """Returns the numbers of the document with the token `begin`, [size, columns]; None without columns."""
    if not (columns := len(stream.loss_columns)):
        return None
    index = int(np.searchsorted(stream.documents, np.uint64(begin), side="right")) - 1
    numbers = np.asarray(stream.values).reshape(-1, columns)[index]
    return torch.from_numpy(numbers.copy()).expand(size, columns)


def _pieces(samples: Any, number: int, data: DataConfig) -> Iterator[tuple[int, int]]:
    """Yields the ranges of a sequence's inputs in the stream."""
    if data.packing == "concat":
        yield number * data.sequence_length, (number + 1) * data.sequence_length
        return
    for piece in range(int(samples.offsets[number]), int(samples.offsets[number + 1])):
        begin = int(samples.starts[piece])
        yield begin, begin + int(samples.lengths[piece])
