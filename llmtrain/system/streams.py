"""Standard streams that accept any text, and may fail: a closed terminal, a full disk, a pipe without a reader.

The output of libraries is kept off the output of a command.
"""

from __future__ import annotations

import io
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from llmtrain.errors import UserError
from llmtrain.system.stops import Stopped

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console

ERASE_LINE = "\r\x1b[2K"
"""Erases the line of a terminal that the cursor is on."""
SHORT_CHARACTERS = 20
"""Characters of a name that a table shows as it is."""


class _Lossy(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, data: ReadableBuffer, /) -> int:
        with suppress(OSError):
            if done := super().write(data):  # None if a terminal is not ready and does not block
                return done
        return memoryview(data).nbytes


def lossy(descriptor: int, owned: bool = True, encoding: str | None = None) -> TextIO:
    """Opens a text stream on a descriptor, for output that must not stop the work.

    owned: whether the descriptor is closed with it. encoding: by default that of the terminal.
    """
    raw = _Lossy(descriptor, "w", closefd=owned)
    encoding = encoding or getattr(sys.__stdout__, "encoding", None) or "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True)


@contextmanager
def reserved_stdout() -> Iterator[TextIO]:
    """Yields a stream on standard output; what libraries print there goes to standard error from now on."""
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        yield output


def open_closed_streams() -> None:
    """Opens closed standard streams on /dev/null.

    Otherwise the next file would get the free descriptor, and with it the printed output.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or lossy(1, owned=False)
    sys.stderr = sys.stderr or lossy(2, owned=False)


def accept_any_text() -> None:
    """Opens closed standard streams, and makes them accept characters that their encoding lacks."""
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is sys.__stderr__:
        sys.stderr = lossy(2, owned=False)  # the exit code also says whatever it prints


def ignore_output_errors() -> None:
    """Drops output that cannot be written, such as to a closed terminal, instead of raising an error."""
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        sys.__stdout__.flush()
        sys.stdout = lossy(1, owned=False)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Holds back what is printed within the context, also by C++ and by children.

    If an error is not the user's, the held output is written to standard error, since it may explain the error.
    """
    buffer = os.memfd_create("llmtrain-libraries")
    streams = {number: os.dup(number) for number in (1, 2)}
    is_printed = False
    _redirect(dict.fromkeys(streams, buffer))
    try:
        yield
    except BaseException as error:
        is_printed = not isinstance(error, UserError | KeyboardInterrupt | Stopped)
        raise
    finally:
        _redirect(streams)
        if is_printed:
            os.write(2, os.pread(buffer, os.fstat(buffer).st_size, 0))
        for descriptor in (buffer, *streams.values()):
            os.close(descriptor)


def plain_console(stderr: bool = False) -> Console:
    """Returns a console that draws bars and spinners on a terminal only.

    Notebooks, as some CI, set FORCE_COLOR, which rich takes for a terminal; and it makes an output of each line there.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, force_jupyter=False, force_terminal=is_terminal(stream))


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Returns a short name for each, for a table: of a long path, the last parts that no other name ends with."""
    known = set(names)

    def short(name: str) -> str:
        if len(name) <= SHORT_CHARACTERS:
            return name
        parts = name.rstrip("/").split("/")
        tails = ["/".join(parts[-count:]) for count in range(1, len(parts))]
        return next((tail for tail in tails if sum(f"/{other}".endswith(f"/{tail}") for other in known) < 2), name)

    return {name: short(name) for name in known}


def print_as_is(console: Console, lines: Iterable[str], style: str = "") -> None:
    """Prints lines without wrapping, highlighting or markup: a path may contain brackets."""
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether bars and spinners can be drawn on a stream.

    Under mpirun a rank's output looks like a terminal, but its lines are passed on; TTY_COMPATIBLE=0 says so.
    """
    return stream is not None and stream.isatty() and os.environ.get("TTY_COMPATIBLE") != "0"


def _redirect(descriptors: Mapping[int, int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number, descriptor in descriptors.items():
        os.dup2(descriptor, number)


def visible(text: str, kept: str = "\n\t") -> str:
    """Returns a text from a model or from data with control and format characters as escapes, to be shown, not obeyed.

    Format characters include those that reverse the direction of text (CVE-2021-42574). kept: characters left as is.
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape", "surrogatepass").decode("ascii")
        if character not in kept and unicodedata.category(character) in ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")
        else character
        for character in text
    )
