"""Standard streams that take any text, and that may fail: a closed terminal, a full disk, a pipe that nobody reads."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Lossy(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, data: ReadableBuffer, /) -> int:
        with suppress(OSError):
            if done := super().write(data):  # nothing, where a terminal is not ready and does not wait
                return done
        return memoryview(data).nbytes


def lossy(descriptor: int, owned: bool = True, encoding: str | None = None) -> TextIO:
    """A text stream on a descriptor, for what is worth less than the work that it tells of.

    owned: whether the descriptor is closed with it. encoding: by default that of the terminal.
    """
    raw = _Lossy(descriptor, "w", closefd=owned)
    encoding = encoding or getattr(sys.__stdout__, "encoding", None) or "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True)


def open_closed() -> None:
    """Opens the standard streams that are closed, to nothing.

    A descriptor that is left closed would be that of the next file, which would get what is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or lossy(1, owned=False)
    sys.stderr = sys.stderr or lossy(2, owned=False)


def take_any_text() -> None:
    """Has the standard streams, once they are open, take what their encoding lacks."""
    open_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is sys.__stderr__:
        sys.stderr = lossy(2, owned=False)  # whatever it tells, the exit code tells too


def outlive_the_terminal() -> None:
    """From now on, what cannot be printed is lost, and nothing else."""
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        sys.__stdout__.flush()
        sys.stdout = lossy(1, owned=False)
