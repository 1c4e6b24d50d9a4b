"""Whether a micro-batch has several documents in a row: known on the host, so that no device is asked.

`transformers` looks for it in the positions before it makes a mask, and waits for the device in each forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import masking_utils

_own = masking_utils.find_packed_sequence_indices
_several: bool | None = None
"""What is known of the batch of this moment; None where nothing is."""


@contextmanager
def documents_known(position_ids: Tensor) -> Iterator[None]:
    """Within it, masks are made for rows of which is known whether they have several documents.

    position_ids: [batch, T], of whole sequences, as the data gave them. On a device nothing is known of them, and
    what is known already stands: slices of a sequence have the mask of the whole one.
    """
    global _several
    if _several is not None or position_ids.device.type != "cpu":
        yield
        return
    _several = bool((np.diff(position_ids.numpy(), axis=1) != 1).any())
    masking_utils.find_packed_sequence_indices = _find
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices, _several = _own, None


def _find(position_ids: Tensor) -> Tensor | None:
    """As `transformers`' own: [batch, T] numbers of documents within their rows; None where all rows have one."""
    if _several is None:
        return _own(position_ids)  # type: ignore[no-any-return]
    if not _several:
        return None
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1)
