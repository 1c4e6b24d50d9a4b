"""The order of training samples, computed and not stored: a keyed permutation of [0, n), and a mixture of sources.

The permutation is a Feistel network, a bijection on 2b-bit numbers for any round function; numbers that it maps outside
[0, n) are mapped again until they fall inside ("cycle walking", Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002), fewer than four times on average. The source of the i-th sample follows from the weights, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

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


MAX_PERIOD = 2**31
"""Upper bound that keeps `remainder * weight` within 63 bits."""


class Mixture:
    """Distributes samples over sources so that each prefix contains every source in proportion.

    The first source takes floor(n * w / W) of the first n samples; the next one takes its share of the remaining
    samples in the same way, and so on. Each source takes 0 or 1 of each further sample, so a sample has exactly one
    source, and its index within that source is computed arithmetically. After every W samples (W is the sum of the
    integer weights) the shares are exact.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = integer_weights(weights)

    def locate(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the source of each sample of `index`, and the sample's index within its source, in the same shape."""
        source = np.full(index.shape, -1, np.int64)
        number = np.zeros(index.shape, np.int64)
        left, total = index, sum(self.weights)
        for candidate, weight in enumerate(self.weights):
            before = _share(left, weight, total)
            chosen = (source < 0) & (_share(left + 1, weight, total) > before)
            source[chosen] = candidate
            number[chosen] = before[chosen]
            left, total = left - before, total - weight
        return source, number

    def share(self, source: int, samples: int) -> int:
        """Returns how many of `samples` consecutive samples come from a source, rounded up."""
        return -(-samples * self.weights[source] // sum(self.weights))


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Returns the smallest integers proportional to the decimal `weights`; rounded only if they are huge."""
    fractions = [Fraction(repr(weight)) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in fractions))
    scaled = [int(fraction * scale) for fraction in fractions]
    divisor = gcd(*scaled)
    scaled = [weight // divisor for weight in scaled]
    total = sum(scaled)
    if total < MAX_PERIOD:
        return scaled
    limit = MAX_PERIOD - len(scaled)
    return [max(1, weight * limit // total) for weight in scaled]


def _share(count: NDArray[np.int64], weight: int, total: int) -> NDArray[np.int64]:
    """Returns floor(count * weight / total), computed within 63 bits."""
    return count // total * weight + count % total * weight // total
