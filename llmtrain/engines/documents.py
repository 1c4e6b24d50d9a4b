"""Where the documents of a micro-batch begin and end: known on the host, so that no device is asked.

`transformers` looks for it in the positions before it makes a mask, and waits for the device in each forward pass; some
families (OPT, BLOOM, gpt-oss) give it no positions to look at, and would have documents see each other. Attention
without a mask is told by arguments of the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from llmtrain.data import Documents, MicroBatch
from llmtrain.engines.overrides.transformers import mask_arguments, replaced
from llmtrain.models import takes_bounds

_own = masking_utils.find_packed_sequence_indices
_known: Documents | None = None
"""What is known of the batch of this moment; None where nothing is."""


@contextmanager
def documents_known(batch: MicroBatch) -> Iterator[Documents | None]:
    """Within it, all masks keep documents apart, and are made for rows of which is known whether they have several.

    batch: of whole sequences, as the data gave them. On a device nothing is known of them, and what is known already
    stands: slices of a sequence have the mask of the whole one, and its bounds.
    """
    global _known
    if _known is not None or batch.documents is None:
        yield _known
        return
    _known = batch.documents
    try:
        with (
            replaced(masking_utils, "find_packed_sequence_indices", _find),
            mask_arguments(partial(_with_positions, batch.position_ids)),
        ):
            yield _known
    finally:
        _known = None


def bounds_for(
    model: PreTrainedModel, batch: MicroBatch, device: torch.device, known: Documents | None = None
) -> dict[str, Any]:
    """Arguments of a model's forward pass by which its attention keeps documents apart; none where a mask does.

    batch: of whole sequences; a device is asked for its own, where nothing is `known` of them.
    """
    if not takes_bounds(model.config._attn_implementation):
        return {}
    return (known or batch.documents or Documents.of(batch.position_ids.cpu())).arguments(device)


def _with_positions(
    known: Tensor, embeddings: Tensor, mask: Any, cache: Any, positions: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Adds the positions that some families leave out."""
    if positions is None and mask is None and cache is None and len(embeddings) == len(known):
        positions = known.to(embeddings.device, non_blocking=True)
    return embeddings, positions


def _find(position_ids: Tensor) -> Tensor | None:
    """As `transformers`' own: [batch, T] numbers of documents within their rows; None where all rows have one."""
    if _known is None:
        return _own(position_ids)  # type: ignore[no-any-return]
    if not _known.several:
        return None
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1)
