"""Compares tensors of several ranks or moments by one number."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → the integers that have its bits."""
CHUNK = 2**24
"""Elements that are summed at once, because integers are copied to int64 for that."""
FACTOR = 1_000_003


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Returns a number that, except by chance, differs if a bit of the tensors does: a scalar of int64 on their device.

    It is made of sums over rows and over columns, weighted by their places. Sums of integers are exact in every order.
    Of a tensor that ranks share, the part of this rank counts.
    """
    total = torch.zeros((), dtype=torch.int64)
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        if not local.numel():
            continue
        bits = local.contiguous().view(-1) if local.dim() < 2 else local.contiguous().flatten(1)
        matrix = bits.view(BITS[bits.element_size()]).view(len(bits), -1)
        for rows in torch.split(matrix, max(1, CHUNK // matrix.shape[1])):
            for dim in (0, 1):
                sums = rows.sum(dim, dtype=torch.int64)
                places = torch.arange(1, len(sums) + 1, device=sums.device)
                total = total.to(sums.device) * FACTOR + (sums * places).sum()
    return total
