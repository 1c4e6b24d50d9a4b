"""Runs an iterator ahead of its consumer, in a thread."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")


class _End:
    """The iterator is done, or raised `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(items: Iterable[T], depth: int = 2) -> Generator[T]:
    """`items`, made up to `depth` ahead in a thread.

    What `items` raises is raised here. Closing the generator stops the thread and waits for it.
    """
    ready: queue.Queue[T | _End] = queue.Queue(depth)
    stop = threading.Event()

    def work() -> None:
        # Signals are the main thread's: two threads of a stopped rank would take its dump and its end at once.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        error: BaseException | None = None
        try:
            for item in items:
                if stop.is_set():
                    return
                ready.put(item)
        except BaseException as caught:  # handed to the consumer, whatever it is
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
        while thread.is_alive():  # it may be waiting for room
            try:
                ready.get(timeout=0.02)
            except queue.Empty:
                continue
