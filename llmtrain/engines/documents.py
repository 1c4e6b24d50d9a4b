"""Document boundaries of a micro-batch, which are known on the host so that no device has to be read.

`transformers` looks for them in the positions before it makes a mask, and waits for the device in each forward pass.
Some families (OPT, BLOOM, gpt-oss) give it no positions to look at, and their documents would see each other. Attention
kernels without a mask receive the boundaries as arguments of the forward pass.
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
"""Documents of the current batch; None if they are unknown."""


@contextmanager
def documents_known(batch: MicroBatch) -> Iterator[Documents | None]:
    """Makes all masks within the context keep documents apart; yields the known documents.

    batch: whole sequences, as the data provided them. If its documents are unknown, as for a batch on a device, the
    context changes nothing. An inner context changes nothing either: slices of a sequence have the mask and the
    boundaries of the whole sequence.
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
    """Returns arguments of a model's forward pass by which its attention keeps documents apart; none if a mask does so.

    batch: whole sequences; positions are copied from the device only if neither `known` nor the batch has documents.
    """
    if not takes_bounds(model.config._attn_implementation):
        return {}
    return (known or batch.documents or Documents.of(batch.position_ids.cpu())).arguments(device)


def _with_positions(
    known: Tensor, embeddings: Tensor, mask: Any, cache: Any, positions: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Adds the positions that some families omit."""
    if positions is None and mask is None and cache is None and len(embeddings) == len(known):
        positions = known.to(embeddings.device, non_blocking=True)
    return embeddings, positions


def _find(position_ids: Tensor) -> Tensor | None:
    """Returns document indices per row, [batch, T], as `transformers` does; None if every row has one document."""
    if _known is None:
        return _own(position_ids)  # type: ignore[no-any-return]
    if not _known.several:
        return None
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1)
