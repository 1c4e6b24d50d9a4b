"""Reads files of JSON objects, one per line, to which another process appends. Reads each byte once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from llmtrain.system.untrusted import open_regular, read_up_to

PART_BYTES = 4 << 20
"""Size in bytes of the parts in which a file is read."""
MOST_LINE_BYTES = 1 << 20
"""Size limit of a line in bytes. Longer lines are skipped."""
MARK_BYTES = 64
"""Number of bytes before the current position that are compared. If they have changed, the file was rewritten."""


class GrowingLines:
    """A file of JSON objects, one per line. Each call of `new` reads what was added since the previous call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        """Number of lines that are not JSON objects. An unfinished last line does not count."""
        self.bytes_read = 0
        """Number of bytes read from the file so far."""
        self._begin()

    def _begin(self) -> None:
        self._position, self._rest, self._mark, self._inode = 0, b"", b"", -1
        self._too_long = False
        self.damaged = 0

    def is_replaced(self) -> bool:
        """Whether the file was rewritten, as by a run that continues. If so, `new` reads it from the start."""
        if not self._position:
            return False
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                same = status.st_ino == self._inode and status.st_size >= self._position
                if same:
                    file.seek(self._position - len(self._mark))
                    same = read_up_to(file, len(self._mark)) == self._mark
        except OSError:
            return False  # A shared disk may fail for a moment; what was read so far is kept.
        if not same:
            self._begin()
        return not same

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields the objects that were added. Raises OSError if the file exists but cannot be read."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        with file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._position)
            while part := read_up_to(file, PART_BYTES):
                self.bytes_read += len(part)
                self._position += len(part)
                self._mark = (self._mark + part)[-MARK_BYTES:]
                *lines, self._rest = (self._rest + part).split(b"\n")
                yield from self._objects(lines)
                if len(self._rest) > MOST_LINE_BYTES:
                    self._rest, self._too_long = b"", True

    def _objects(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            value = None if self._too_long or len(line) > MOST_LINE_BYTES else _parsed(line)
            self._too_long = False
            if isinstance(value, dict):
                yield value
            else:
                self.damaged += 1


def _parsed(line: bytes) -> Any:
    try:
        return from_json(line, allow_inf_nan=True)
    except ValueError:
        return None
