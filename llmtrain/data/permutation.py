"""A keyed permutation of [0, n) that is computed, not stored.

A Feistel network is a bijection on 2b-bit numbers for any round function; numbers that it maps outside [0, n) are
mapped again until they fall inside ("cycle walking", Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002),
fewer than four times on average.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def permutation_key(*parts: int | str) -> int:
    """Returns a 64-bit key, the hash of its parts."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())


def permute(index: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Maps each of `index` with the permutation of [0, size) chosen by `key`; any shape, O(1) per element."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = [np.uint64((key + (number + 1) * _GOLDEN) % _WORD) for number in range(ROUNDS)]
    values = _feistel(index.astype(np.uint64).ravel(), half, keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        walked = _feistel(values[outside], half, keys)
        values[outside] = walked
        outside = outside[walked >= size]
    return values.astype(np.int64).reshape(index.shape)


def _feistel(values: NDArray[np.uint64], half: np.uint64, keys: Sequence[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) in place, since arrays are short."""
    words ^= words >> _SHIFTS[0]
    words *= _FACTORS[0]
    words ^= words >> _SHIFTS[1]
    words *= _FACTORS[1]
    words ^= words >> _SHIFTS[2]
    return words
