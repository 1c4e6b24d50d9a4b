"""Sources are mixed by their weights, each in its own order, and any position is found without reading the others."""

from __future__ import annotations

import numpy as np
import pytest

from llmtrain.data.order import Mixture, integer_weights

WEIGHTS = [(1.0,), (3.0, 1.0), (0.7, 0.2, 0.1), (0.5, 0.25, 0.125, 0.125), (5.0, 1.0, 1.0, 1.0, 1.0, 0.001)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_source_is_read_in_its_own_order_without_a_gap(weights: tuple[float, ...]) -> None:
    source, number = Mixture(weights).locate(np.arange(20_000))
    for candidate in range(len(weights)):
        mine = number[source == candidate]
        assert np.array_equal(mine, np.arange(len(mine)))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_shares_are_exact_after_a_period_and_near_before(weights: tuple[float, ...]) -> None:
    integers = np.array(integer_weights(weights))
    period = int(integers.sum())
    source, _ = Mixture(weights).locate(np.arange(3 * period))
    counts = np.stack([np.cumsum(source == candidate) for candidate in range(len(weights))])
    assert np.array_equal(counts[:, period - 1], integers)
    assert np.array_equal(counts[:, -1], 3 * integers)
    expected = integers[:, None] / period * np.arange(1, 3 * period + 1)
    assert abs(counts - expected).max() < 2


def test_distant_samples_are_found_directly() -> None:
    mixture = Mixture([2.0, 1.0])
    source, number = mixture.locate(np.array([3 * 10**15, 3 * 10**15 + 1, 3 * 10**15 + 2]))
    assert sorted(zip(source.tolist(), number.tolist(), strict=True)) == [
        (0, 2 * 10**15),
        (0, 2 * 10**15 + 1),
        (1, 10**15),
    ]


def test_weights_become_the_smallest_integers() -> None:
    assert integer_weights([0.7, 0.3]) == [7, 3]
    assert integer_weights([2.0, 4.0]) == [1, 2]
    assert integer_weights([1 / 3, 1e-12])[1] == 1  # too fine to be exact: rounded, never left out
    assert sum(integer_weights([0.123456789012, 1 / 3])) < 2**31
