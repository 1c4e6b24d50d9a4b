"""The size of a weight in NF4 with double quantization (`llmtrain.models.nf4`)."""

from __future__ import annotations

BLOCK = 64
"""Elements with a common scale, the paper's block size for weights."""
BLOCKS = 256
"""Scales with a common scale, its block size for these."""
TABLES = 4 * (2 * 256 + 256)
"""Bytes of the values of all codes, of which a rank has one table."""
WORKSPACE = 6
"""Bytes for each element of a weight while it is made whole: its fp32 value, and an index or the rounded value."""


def packed_bytes(elements: int) -> int:
    """Returns the bytes of a weight: half a byte per element, one per block, four per 256 blocks and for the mean."""
    blocks = -(-elements // BLOCK)
    return -(-elements // 2) + blocks + 4 * (-(-blocks // BLOCKS) + 1)
