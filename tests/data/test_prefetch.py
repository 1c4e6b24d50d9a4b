"""Prefetched batches keep their order and their errors, within bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from llmtrain.data import prefetch
from llmtrain.data.prefetch import prefetched


def running() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


def test_prefetched_items_keep_their_order() -> None:
    assert list(prefetched(range(100))) == list(range(100))
    assert running() == 0


def test_an_error_is_raised_after_the_earlier_items() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("lost")

    items = prefetched(broken())
    assert next(items) == 1
    with pytest.raises(KeyError, match="lost"):
        next(items)
    assert running() == 0


def test_prefetching_is_bounded() -> None:
    made = []
    enough = threading.Event()

    def endless() -> Iterator[int]:
        for number in range(10**9):
            made.append(number)
            if number == 3:
                enough.set()
            yield number

    items = prefetched(endless(), depth=2)
    assert next(items) == 0
    assert enough.wait(5)
    assert len(made) <= 4  # one taken, two ready, one waiting for room
    items.close()
    assert running() == 0


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MAX_WAIT_S", 0.05)
    release = threading.Event()

    def stuck() -> Iterator[int]:
        yield 1
        release.wait()

    items = prefetched(stuck())
    assert next(items) == 1
    items.close()
    assert running() == 1
    release.set()
