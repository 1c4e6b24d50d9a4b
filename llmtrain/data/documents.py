"""The boundaries of the documents in a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Documents:
    """The boundaries of the documents in a micro-batch, with its rows concatenated; in host memory."""

    NAMES: ClassVar[tuple[str, ...]] = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    """Names of the arguments that `transformers` passes through its models."""

    bounds: torch.Tensor
    """int32 [documents + 1]: 0, then the end of each document; the last one is the total number of tokens."""
    longest: int
    """Number of tokens of the longest document."""
    several: bool
    """Whether any row contains several documents."""

    @classmethod
    def of(cls, position_ids: torch.Tensor) -> Documents:
        """Finds the documents.

        position_ids: [batch, T], of whole sequences, on the host; each document counts by one.
        """
        import torch  # imported here, since preparing data in a launcher must not load it

        positions = position_ids.numpy()
        begins = np.ones(positions.shape, dtype=bool)
        begins[:, 1:] = np.diff(positions, axis=1) != 1
        bounds = np.append(np.flatnonzero(begins), positions.size).astype(np.int32)
        return cls(torch.from_numpy(bounds), int(np.diff(bounds).max()), several=len(bounds) - 1 > len(positions))

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Returns arguments for a model's forward pass."""
        bounds = self.bounds.to(device, non_blocking=True)
        return dict(zip(self.NAMES, (bounds, bounds, self.longest, self.longest), strict=True))
