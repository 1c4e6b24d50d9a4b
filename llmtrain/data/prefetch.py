"""Runs an iterator ahead of its consumer in a thread."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

MAX_WAIT_S = 5.0
"""Longest time that closing waits for the thread: a chat template, which is a program, may never end."""


class _End:
    """Marks that the iterator has finished, or raised `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(items: Iterable[T], depth: int = 2) -> Generator[T]:
    """Yields `items`, produced up to `depth` ahead in a thread.

    Errors of `items` are raised here. Closing the generator stops the thread and waits for it, but not
    for ever.
    """
    ready: queue.Queue[T | _End] = queue.Queue(depth)
    stop = threading.Event()

    def work() -> None:
        # Signals belong to the main thread: two threads of a stopped rank would handle its dump and its end at once.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        error: BaseException | None = None
        try:
            for item in items:
                if stop.is_set():
                    return
                ready.put(item)
        except BaseException as caught:  # passed to the consumer, whatever it is
            error = caught
        ready.put(_End(error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        deadline = time.monotonic() + MAX_WAIT_S
        while thread.is_alive() and time.monotonic() < deadline:  # it may be waiting for room in the queue
            with suppress(queue.Empty):
                ready.get(timeout=0.02)
