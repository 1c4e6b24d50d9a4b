"""Flat arrays on disk, and the pages that are requested before they are read."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from llmtrain.data import arrays
from llmtrain.data.arrays import (
    CHUNK_BYTES,
    ArrayWriter,
    disable_readahead,
    open_array,
    prefetch_ranges,
    require_intact,
)
from llmtrain.errors import DataError

PAGE = mmap.PAGESIZE


class Advised:
    """In the place of a mapping: the pages of each advice."""

    hashes = None

    def __init__(self) -> None:
        self.pages: list[range] = []

    def madvise(self, advice: int, start: int, size: int) -> None:
        assert advice == mmap.MADV_WILLNEED
        assert start % PAGE == 0
        self.pages.append(range(start // PAGE, start // PAGE + -(-size // PAGE)))


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Advised:
    found = Advised()
    monkeypatch.setattr(arrays, "_map_of", lambda _: found)
    return found


def written(folder: Path, values: np.ndarray) -> np.ndarray:
    with ArrayWriter(folder, "numbers", values.dtype) as writer:
        writer.append(values)
    return open_array(folder, "numbers", values.dtype, len(values))


def test_exactly_the_pages_of_the_ranges_are_requested(advised: Advised) -> None:
    random = np.random.default_rng(1)
    values = np.zeros(1, np.uint16)
    for _ in range(50):
        starts = random.integers(0, 10**7, 40)
        ends = starts + random.integers(1, 10**5, 40)
        advised.pages.clear()
        prefetch_ranges(values, starts, ends)
        asked = [page for pages in advised.pages for page in pages]
        wanted = {
            page
            for start, end in zip(starts, ends, strict=True)
            for page in range(2 * start // PAGE, (2 * end - 1) // PAGE + 1)
        }
        assert sorted(asked) == sorted(wanted)  # and none twice
        assert max(map(len, advised.pages)) * PAGE <= 128 << 10


def test_adjacent_ranges_are_requested_together(advised: Advised) -> None:
    items = PAGE // 8
    prefetch_ranges(
        np.zeros(1, np.int64), np.array([5 * items, 0, items, 3]), np.array([5 * items + 1, 9, 2 * items, 4])
    )
    assert advised.pages == [range(2), range(5, 6)]
    prefetch_ranges(np.zeros(1, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))
    assert len(advised.pages) == 2


def test_opened_arrays_read_the_same_data(tmp_path: Path) -> None:
    values = np.arange(100_000, dtype=np.uint32)
    opened = written(tmp_path, values)
    assert arrays._map_of(opened) is not None
    assert arrays._map_of(opened[5:]) is None
    assert arrays._map_of(values) is None
    for array in (opened, opened[5:], values, np.empty(0, np.uint32)):
        prefetch_ranges(array, np.array([0, 70_000]), np.array([1, 100_000]))
        disable_readahead(array)
    assert np.array_equal(opened, values)
    with pytest.raises(ValueError, match="read-only"):
        opened[0] = 1


def test_a_changed_bit_is_found_where_it_is_read_and_not_elsewhere(tmp_path: Path) -> None:
    values = np.arange(40_000, dtype=np.uint16)
    with ArrayWriter(tmp_path, "numbers", values.dtype) as writer:
        for part in np.split(values, [3, 5000, 5000, 5001, 30_000]):
            writer.append(part)
    path = tmp_path / "numbers.bin"
    for changed in (0, CHUNK_BYTES - 1, 50_001, 2 * len(values) - 1):
        content = bytearray(values.tobytes())
        content[changed] ^= 1
        path.write_bytes(content)
        array = open_array(tmp_path, "numbers", values.dtype, len(values))
        for start in range(0, len(values), 997):
            end = min(start + 1500, len(values))
            pages = range(2 * start // CHUNK_BYTES, (2 * end - 1) // CHUNK_BYTES + 1)
            if changed // CHUNK_BYTES in pages:
                with pytest.raises(DataError, match=r"numbers.bin: the bytes .* are not those that were written"):
                    require_intact(array, np.array([start]), np.array([end]))
            else:
                require_intact(array, np.array([start, start]), np.array([end, start]))
