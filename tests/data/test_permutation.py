"""The permutation of samples is a bijection, differs by key, mixes well, and never changes between versions."""

from __future__ import annotations

import numpy as np
import pytest

from llmtrain.data.order import permutation_key, permute


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 1000, 4097, 65537])
def test_is_a_bijection(size: int) -> None:
    out = permute(np.arange(size), size, permutation_key(1, "source", 0))
    assert np.array_equal(np.sort(out), np.arange(size))


def test_an_item_does_not_depend_on_other_queries() -> None:
    key = permutation_key(3)
    whole = permute(np.arange(1000), 1000, key)
    assert permute(np.array([[7, 999], [0, 7]]), 1000, key).tolist() == [[whole[7], whole[999]], [whole[0], whole[7]]]


def test_every_key_gives_another_order() -> None:
    orders = [permute(np.arange(100), 100, permutation_key(seed, "s", epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_every_item_comes_in_every_place() -> None:
    """Over 4000 keys each of the 10 x 10 (item, place) pairs is met about 400 times (5 sigma: 95)."""
    met = np.zeros((10, 10), int)
    for key in range(4000):
        met[np.arange(10), permute(np.arange(10), 10, permutation_key(key))] += 1
    assert abs(met - 400).max() < 100


def test_neighbours_are_separated() -> None:
    order = permute(np.arange(10_000), 10_000, permutation_key(5))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


def test_the_largest_sizes_are_permuted() -> None:
    size = 2**45 + 12345
    out = permute(np.arange(size - 1000, size), size, permutation_key(1))
    assert len(np.unique(out)) == 1000
    assert out.min() >= 0
    assert out.max() < size


@pytest.mark.parametrize(
    ("size", "places"),
    [
        (1000, [201, 98, 845, 14, 421, 368, 515]),
        (10**9 + 7, [313287250, 603879375, 932680179, 69587903, 591151881, 511667588, 457230394]),
        (2**45 + 12345, [32441533227228, 4587787532809, 18275511986746, 19101837731887, 27775130197511]),
    ],
)
def test_the_order_is_the_one_that_checkpoints_were_written_in(size: int, places: list[int]) -> None:
    index = np.linspace(0, size - 1, 7).astype(np.int64)[: len(places)]
    assert permute(index, size, permutation_key(1, "source", 0)).tolist() == places
