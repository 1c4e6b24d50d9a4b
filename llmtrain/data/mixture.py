"""Determines the source of the i-th training sample: by weight, exact, without state."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np
from numpy.typing import NDArray

LARGEST_PERIOD = 2**31
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
    divisor = int(np.gcd.reduce(np.array(scaled, dtype=object)))
    scaled = [weight // divisor for weight in scaled]
    total = sum(scaled)
    if total < LARGEST_PERIOD:
        return scaled
    limit = LARGEST_PERIOD - len(scaled)
    return [max(1, weight * limit // total) for weight in scaled]


def _share(count: NDArray[np.int64], weight: int, total: int) -> NDArray[np.int64]:
    """Returns floor(count * weight / total), computed within 63 bits."""
    return count // total * weight + count % total * weight // total
