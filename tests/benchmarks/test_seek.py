"""A sparse corpus for seek times: samples are found, whether they are in the page cache or not."""

from __future__ import annotations

import pytest

from benchmarks.programs import seek
from llmtrain.errors import DataError


def test_a_sample_is_found_and_a_gap_is_reported(tmp_path):
    folder = tmp_path / "large"
    seek.make(folder, sequences=2**20, sample=10**6)
    for batch in (False, True):
        for cold in (False, True):
            found = seek.read(folder, batch, cold, sequences=2**20, sample=10**6)
            assert found["seek_ms"] > 0
            assert found["read_kib"] >= 0
    with pytest.raises(DataError, match="are not those that were written"):
        seek.read(folder, batch=True, cold=False, sequences=2**20, sample=5)
