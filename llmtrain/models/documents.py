"""Attention masks of packed documents.

The document boundaries of a micro-batch are known on the host, so no device has to be read. `transformers` looks for
them in the positions before it makes a mask, and waits for the device in each forward pass. Some families (OPT, BLOOM,
gpt-oss) give it no positions to look at, and their documents would see each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmtrain.data import Documents, MicroBatch
from llmtrain.overrides.transformers import document_indices, mask_arguments


@contextmanager
def document_masks(batch: MicroBatch) -> Iterator[None]:
    """A context in which the attention masks that a model makes keep documents apart.

    batch: whole sequences, as the data provided them. If its documents are unknown, as for a batch on a device, the
    context changes nothing.
    """
    if batch.documents is None:
        yield
        return
    with (
        document_indices(partial(_document_indices, batch.documents)),
        mask_arguments(partial(_with_positions, batch.position_ids)),
    ):
        yield


def _with_positions(
    position_ids: Tensor, embeddings: Tensor, mask: Any, cache: Any, positions: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Adds the positions that some families omit. position_ids: [batch, T], of the whole sequences."""
    if positions is None and mask is None and cache is None and len(embeddings) == len(position_ids):
        positions = position_ids.to(embeddings.device, non_blocking=True)
    return embeddings, positions


def _document_indices(documents: Documents, position_ids: Tensor) -> Tensor | None:
    """Returns document indices per row, [batch, T], as `transformers` does; None if every row has one document."""
    if not documents.has_shared_rows:
        return None
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1)
