"""Runs the chat templates of others, which are programs, in a process whose time and memory the kernel limits.

A template can loop for ever, or compute `10**(10**8)` in one operation that no exception interrupts. One process serves
all calls within a context, so that ordinary data costs one message per batch.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from llmtrain.errors import DataError, Problem, reason

TEMPLATE_FIELD = "data.chat_template"
CPU_S = 10
"""Processor time of a call, in seconds, and MESSAGES_PER_S more messages take a second more."""
MESSAGES_PER_S = 200
MORE_BYTES = 2 << 30
"""Memory that a call may take, beyond that of the process when it starts."""
MAX_CHARACTERS = 1 << 28
"""Largest number of characters that a call may write."""
Render = Callable[..., tuple[list[str], Any]]


class TemplateRefusedError(Exception):
    """What a template raised."""


class _Process:
    """A process that renders."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, self._pipe), daemon=True)
        self._process.start()
        far.close()

    def call(
        self, render: Render, messages: int, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[list[str], Any]:
        """Raises TemplateRefusedError, or DataError if the process exceeded its limits, after which it is gone."""
        seconds = CPU_S + messages // MESSAGES_PER_S
        self._pipe.send((render, seconds, arguments, options))
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            message = f"does not end within {seconds} s, or takes more than {MORE_BYTES >> 30} GiB of memory"
            fix = "name another template"
            raise DataError(Problem("data.chat_template_limits", TEMPLATE_FIELD, message, fix)) from None
        if isinstance(answer, str):
            raise TemplateRefusedError(answer)
        found: tuple[list[str], Any] = answer
        return found

    def end(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.kill()
        self._process.join()


class _Shared:
    """What all threads share: rows are rendered in a thread of their own."""

    contexts = 0
    worker: _Process | None = None
    lock = threading.Lock()


@contextmanager
def limited_templates() -> Iterator[None]:
    """Limits the time and the memory of each call of a template within the context, in all threads."""
    _Shared.contexts += 1
    try:
        yield
    finally:
        _Shared.contexts -= 1
        if not _Shared.contexts:
            _end_worker()


def _end_worker() -> None:
    if _Shared.worker is not None:
        _Shared.worker.end()
        _Shared.worker = None


def run_template(render: Render, messages: int, *arguments: Any, **options: Any) -> tuple[list[str], Any]:
    """Calls `render`, a function of a module, in a limited process within `limited_templates`.

    render: returns the texts, and the spans of turns or None. messages: number of messages to render. Raises what
    `render` raises, or TemplateRefusedError, and DataError for a template that exceeds the limits.
    """
    if not _Shared.contexts:
        return render(*arguments, **options)
    with _Shared.lock:
        _Shared.worker = _Shared.worker or _Process()
        try:
            return _Shared.worker.call(render, messages, arguments, options)
        except DataError:
            _end_worker()
            raise


def _serve(pipe: Connection, other: Connection) -> None:
    """Answers calls until the other end of the pipe is closed."""
    other.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)  # the kernel ends the process, in whatever operation it is
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_DATA, _data_bytes() + MORE_BYTES)
    while True:
        try:
            render, seconds, arguments, options = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)
        try:
            texts, found = render(*arguments, **options)
            answer: Any = (texts, [list(span) for span in found] if found else found)
            if (size := sum(map(len, texts))) > MAX_CHARACTERS:
                answer = f"it writes {size:,} characters, of at most {MAX_CHARACTERS:,}"
        except MemoryError:
            os._exit(1)
        except BaseException as error:  # a template is a program and can raise anything
            answer = reason(error)
        pipe.send(answer)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _data_bytes() -> int:
    """Returns the bytes that count for RLIMIT_DATA."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
