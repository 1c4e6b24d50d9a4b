"""The documented formulas of `optim.schedule` are those of the engines, which a picture shows."""

from __future__ import annotations

import math

import pytest

from tools import pictures


def documented(kind: str, s: int, n: int, w: int, d: int, m: float) -> float:
    """As in docs/reference/recipe.md."""
    if s < w:
        return m + (1 - m) * s / w if kind == "wsd" else s / w
    match kind:
        case "constant":
            return 1.0
        case "linear":
            return (n - s) / (n - w)
        case "cosine":
            return m + (1 - m) * (1 + math.cos(math.pi * (s - w) / (n - w))) / 2
        case "inverse_sqrt":
            return math.sqrt(w / s) if w else math.sqrt(10_000 / (10_000 + s))
    return 1.0 if s < n - d else m + (1 - m) * (n - s) / d


@pytest.mark.parametrize("kind", pictures.COLOURS)
@pytest.mark.parametrize(("n", "w", "d", "m"), [(100, 10, 30, 0.1), (37, 0, 12, 0.0), (20, 5, 15, 0.5)])
def test_every_step_has_the_documented_rate(kind, n, w, d, m):
    rates = pictures.rates(kind, n, w, d, m)
    assert rates[:n] == pytest.approx([documented(kind, s, n, w, d, m) for s in range(n)], rel=1e-12, abs=1e-15)
