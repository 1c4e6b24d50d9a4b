"""Where the documents of a micro-batch begin and end: known on the host, so that no device is asked.

`transformers` looks for it in the positions before it makes a mask, and waits for the device in each forward pass.
Attention without a mask is told by arguments of the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from llmtrain.models import Documents, takes_bounds

_own = masking_utils.find_packed_sequence_indices
_known: Documents | None = None
"""What is known of the batch of this moment; None where nothing is."""


@contextmanager
def documents_known(position_ids: Tensor) -> Iterator[Documents | None]:
    """Within it, masks are made for rows of which is known whether they have several documents.

    position_ids: [batch, T], of whole sequences, as the data gave them. On a device nothing is known of them, and
    what is known already stands: slices of a sequence have the mask of the whole one, and its bounds.
    """
    global _known
    if _known is not None or position_ids.device.type != "cpu":
        yield _known
        return
    _known = Documents.of(position_ids)
    masking_utils.find_packed_sequence_indices = _find
    try:
        yield _known
    finally:
        masking_utils.find_packed_sequence_indices, _known = _own, None


def bounds_for(
    model: PreTrainedModel, position_ids: Tensor, device: torch.device, known: Documents | None = None
) -> dict[str, Any]:
    """Arguments of a model's forward pass by which its attention keeps documents apart; none where a mask does.

    position_ids: [batch, T], of whole sequences; a device is asked for its own, where nothing is `known` of them.
    """
    if not takes_bounds(model.config._attn_implementation):
        return {}
    return (known or Documents.of(position_ids.cpu())).arguments(device)


def _find(position_ids: Tensor) -> Tensor | None:
    """As `transformers`' own: [batch, T] numbers of documents within their rows; None where all rows have one."""
    if _known is None:
        return _own(position_ids)  # type: ignore[no-any-return]
    if not _known.several:
        return None
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1)
