"""Where the documents of a micro-batch begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Documents:
    """Where the documents of a micro-batch begin and end, its rows joined to one; on the host."""

    NAMES: ClassVar[tuple[str, ...]] = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    """Of the arguments, as `transformers` hands them through its models."""

    bounds: torch.Tensor
    """int32 [documents + 1]: 0, the end of each document, and so the number of all tokens at last."""
    longest: int
    """Tokens of the longest document."""
    several: bool
    """Whether any row has more than one."""

    @classmethod
    def of(cls, position_ids: torch.Tensor) -> Documents:
        """position_ids: [batch, T], of whole sequences, on the host; within a document each is one more."""
        import torch  # not above: preparing data, in a launcher, must not load it

        positions = position_ids.numpy()
        begins = np.ones(positions.shape, dtype=bool)
        begins[:, 1:] = np.diff(positions, axis=1) != 1
        bounds = np.append(np.flatnonzero(begins), positions.size).astype(np.int32)
        return cls(torch.from_numpy(bounds), int(np.diff(bounds).max()), several=len(bounds) - 1 > len(positions))

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Arguments of a model's forward pass."""
        bounds = self.bounds.to(device, non_blocking=True)
        return dict(zip(self.NAMES, (bounds, bounds, self.longest, self.longest), strict=True))
