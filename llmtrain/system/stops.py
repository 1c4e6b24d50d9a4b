"""The signals that end a run, before and while it has something to save."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, NoReturn

from llmtrain.errors import Exit

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that tell a run to save and stop, for the launcher and the workers."""
QUIT = signal.SIGQUIT
"""The signal that ends a run at once (Ctrl-\\). A second SIGINT is handled like this signal."""

_received: set[int] = set()
"""Signals that were received since the program began to collect them."""
_postponed: set[int] = set()
"""Signals that are handled after those that arrived with them."""
_stopped_by: int | None = None
"""The signal for which `Stopped` was raised, whatever error it became on its way."""
_events: SimpleQueue[Any] | None = None
"""The queue that receives signals at present, or None."""


class Stopped(BaseException):
    """A signal stopped a run before its workers were started. Raised by a signal handler, in the main thread."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stopped_by() -> int | None:
    """Returns the signal for which `Stopped` was raised, or None.

    Code that was interrupted may raise another error instead: `type()` wraps what `__set_name__` raises (until Python
    3.12), and so do libraries.
    """
    return _stopped_by


def before_the_first_step(number: int) -> str:
    """Returns the message for a run that has nothing to save."""
    return f"stopped on {signal.Signals(number).name} before the first step; the same command starts the run again"


def after_step(number: int, step: int) -> str:
    """Returns the message for a run that has saved."""
    return f"stopped on {signal.Signals(number).name} after step {step:,}; the same command continues the run"


def say(line: str, descriptor: int = 2) -> None:
    """Prints a line for the user, if the stream is still open.

    descriptor: that of standard error, or of its copy if it was redirected.
    """
    with suppress(OSError, ValueError):
        os.write(descriptor, f"{line}\n".encode())


def leave(code: int) -> NoReturn:
    """Ends the process without the interpreter's shutdown.

    That would restore handlers that let a late signal kill it.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def ignore_signals() -> None:
    """Ignores signals from now on, so that one during the interpreter's shutdown does not change the exit code."""
    for number in (*STOP_SIGNALS, QUIT):
        signal.signal(number, signal.SIG_IGN)


def interrupt_on_sigterm() -> None:
    """Makes SIGTERM end a command as Ctrl-C does, so that it removes its temporary files."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def stop_by_exception() -> None:
    """Makes the first signal raise `Stopped` in the main thread.

    Code that cannot pass an exception on (a finalizer, a callback from C or Rust) makes the interpreter print it and go
    on: then the signal is sent again. Signals during the interpreter's shutdown are ignored.
    """
    global _events
    received = _events = SimpleQueue()

    def note(number: int, _: FrameType | None) -> None:
        global _stopped_by
        is_first = received.empty()
        received.put(number)
        if number == QUIT:
            _end_at_once()
        if is_first:
            _stopped_by = number
            raise Stopped(number)

    def send_again(lost: sys.UnraisableHookArgs) -> None:
        if isinstance(lost.exc_value, Stopped):
            number = lost.exc_value.number
            received.get_nowait()  # it is the first signal again
            _received.discard(number)
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()  # not now: this hook could not pass it on
        else:
            sys.__unraisablehook__(lost)

    sys.unraisablehook = send_again
    _handle(note)
    atexit.register(ignore_signals)


@contextmanager
def caught_signals() -> Iterator[SimpleQueue[Any]]:
    """Collects the signals that end a program in a queue, instead of ending this one.

    A nested queue begins with the signals of the outer one, and returns those that were not consumed.
    """
    global _events
    outer, events = _events, SimpleQueue[Any]()  # its `put` may be called from a signal handler
    if outer is None:
        _received.clear()
    previous = _handle(lambda number, _: events.put(number))
    _events = events
    _move(outer, events)
    try:
        yield events
    finally:
        _events = outer
        for number, handler in previous.items():
            signal.signal(number, handler)
        if outer is not None:
            _move(events, outer)


def wait_for_signal(seconds: float) -> int | None:
    """Waits for `seconds`, or until a signal stops the program; returns its number, or None. Main thread only."""
    with caught_signals() as events:
        try:
            number: int = events.get(timeout=seconds)
        except Empty:
            return None
    return number


def _handle(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Handles all signals except for ignored ones, which stay ignored (nohup); returns the previous handlers.

    If several signals wait, the order in which they were sent is unknown, because Python handles them by their numbers.
    Therefore nothing depends on this order. QUIT is handled before a SIGHUP or SIGINT that waits with it, and a SIGINT
    ends a run at once only if it is the second SIGINT, not if it follows another signal.
    """

    def receive(number: int, frame: FrameType | None) -> None:
        if number in _postponed:
            return
        if number < QUIT:
            _postponed.add(number)
            try:
                signal.raise_signal(number)  # handles all that wait, before it returns
            finally:
                _postponed.remove(number)
        is_impatient = number == signal.SIGINT and number in _received
        _received.add(number)
        handler(QUIT if is_impatient else number, frame)

    handled = [number for number in (*STOP_SIGNALS, QUIT) if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, receive) for number in handled}


def _move(source: SimpleQueue[Any] | None, target: SimpleQueue[Any]) -> None:
    """Moves the signals of one queue to another."""
    while source is not None and not source.empty():
        event = source.get()
        if isinstance(event, int):
            target.put(event)


def _end_at_once() -> NoReturn:
    """Ends the process without cleaning up; the kernel ends its children that asked for it."""
    with suppress(OSError, ValueError):
        me = os.getpid()
        for child in Path(f"/proc/{me}/task/{me}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    os._exit(Exit.INTERRUPTED)
