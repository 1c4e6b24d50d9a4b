"""Divisors: degrees and micro-batches have to divide without a remainder."""

from __future__ import annotations

import math
from functools import cache


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Returns all divisors of a positive number in increasing order, within milliseconds for the largest clusters."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
