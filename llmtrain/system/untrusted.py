"""Reads files that a user, another program or a failing disk may have changed, and checks what is JSON data.

Only regular files are opened, since a FIFO or a device may block forever. The size of what is read is limited. JSON is
validated against the expected type. Every problem with a file is an OSError or a ValueError: `UNREADABLE`.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from llmtrain.errors import Problem, UserError, format_value, printable, truncate

T = TypeVar("T")

MAX_BYTES = 64 << 20
"""Size of the longest text or JSON document that is read."""
BYTE_ORDER_MARK = "\ufeff"
UNREADABLE = (OSError, ValueError)
"""The exceptions of the functions below about a file, for `except`; `file_fault` formats them."""
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def open_regular(path: Path) -> FileIO:
    """Opens a regular file, or a link to one, for unbuffered reading. Raises OSError for anything else."""
    try:
        # Checked before opening, since opening a device may have effects, and again for the opened file.
        require_regular(path.stat(), path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        require_regular(os.fstat(descriptor), path)
        return FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def expanded(name: str) -> Path:
    """Returns a path with `~` expanded, or unchanged if that home directory is unknown."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 - pathlib's raises RuntimeError


def is_folder(path: Path) -> bool:
    """Whether a path that a user named is a folder; False for a name that is too long, where pathlib's raises."""
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: Path) -> bool:
    """Whether a path that a user named is a file; False for a name that is too long, where pathlib's raises."""
    return os.path.isfile(path)  # noqa: PTH113


@contextmanager
def utf8_name(folder: Path) -> Iterator[Path]:
    """Yields a folder under a UTF-8 name, which libraries written in Rust require."""
    if str(folder).isascii() or os.fsencode(folder).decode(errors="replace") == str(folder):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads a regular file. Raises OSError, also for a file longer than `max_bytes`."""
    with open_regular(path) as file:
        content = read_up_to(file, max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"is longer than {max_bytes:,} bytes", str(path))
    return content


def read_up_to(file: FileIO, size: int) -> bytes:
    """Reads up to `size` bytes from an unbuffered file."""
    content = bytearray()
    while len(content) < size and (part := file.read(size - len(content))):
        content += part
    return bytes(content)


def is_yaml(name: str) -> bool:
    """Whether a file is YAML, by its name."""
    return name.endswith((".yaml", ".yml"))


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Reads a regular file as UTF-8. Raises OSError, or ValueError for other bytes."""
    return read_bytes(path, max_bytes).decode("utf-8")


def read_json(path: Path, kind: type[T], max_bytes: int = MAX_BYTES) -> T:
    """Reads the JSON document in a regular file as an object of a type. Raises OSError or ValueError."""
    return parse_json(read_bytes(path, max_bytes), kind)


def parse_json(content: bytes | str, kind: type[T]) -> T:
    """Parses a JSON document as an object of a type. Raises ValueError for other content."""
    value: T = _adapter(kind).validate_json(content)
    return value


def file_fault(error: Exception) -> str:
    """Describes what was wrong with a file on one line, without its path."""
    if isinstance(error, ValidationError):
        first, *others = error.errors(include_url=False, include_context=False, include_input=False)
        where = ".".join(map(str, first["loc"]))
        more = f", and {len(others):,} more faults" if others else ""
        return f"{printable(truncate(where)) or 'content'}: {first['msg']}{more}"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text (byte {error.start:,})"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextmanager
def refusing(kind: type[UserError], field: str, path: Path, rule: str = "") -> Iterator[None]:
    """Turns an exception about a file, or about what its content lacks, into an error of the user.

    field: of the recipe, which names the file. rule: that of the problem, by default the field.
    """
    try:
        yield
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise kind(Problem(rule or field, field, f"{path} cannot be read: {file_fault(error)}")) from None


def require_regular(status: os.stat_result, path: Path) -> None:
    """Raises OSError unless it is a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def require_regular_files(folder: Path) -> None:
    """Raises OSError if a folder contains a FIFO, a socket or a device, on which a library could block."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # a link to nothing
            status = path.stat()
            if not stat.S_ISDIR(status.st_mode):
                require_regular(status, path)


MAX_NESTED = 32
"""Largest depth of nested lists and objects."""
MAX_DIGITS = 40
"""Largest number of digits of an integer in `model.config`. Rules report numbers that are too large; this limit only
bounds the arithmetic."""
TOO_LARGE = f"it contains an integer of more than {MAX_DIGITS} digits"
TOO_DEEP = f"lists and objects are nested deeper than {MAX_NESTED} levels"


def json_fault(value: Any) -> str | None:
    """Returns why a value cannot be written as JSON and read again, or be used as a name, or None if it can.

    Uses no recursion, since a value may be nested deeper than the interpreter's limit.
    """
    level = [value]
    for _ in range(MAX_NESTED):
        for item in level:
            if fault := _item_fault(item):
                return fault
        level = [child for item in level for child in _children(item)]
        if not level:
            return None
    return TOO_DEEP


def _children(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return [*item, *item.values()]
    return item if isinstance(item, (list, tuple)) else ()


def _item_fault(item: Any) -> str | None:
    if isinstance(item, str):
        if "\0" in item:
            return "it contains a NUL character"
        return None if item.isascii() or is_unicode(item) else "it contains a character that is not valid Unicode"
    if isinstance(item, float):
        return None if math.isfinite(item) else f"{item} is not a finite number"
    if isinstance(item, int):
        return None if abs(item) < 10**MAX_DIGITS else TOO_LARGE
    if isinstance(item, dict):
        names = [name for name in item if not isinstance(name, str)]
        return f"{format_value(names[0])} is not a name: names are strings" if names else None
    if item is None or isinstance(item, (list, tuple, BaseModel)):  # a model has checked its own fields
        return None
    return f"it contains a {type(item).__name__}, which is not JSON data"


def is_unicode(text: str) -> bool:
    """Returns whether a string can be encoded; JSON can contain half of a surrogate pair, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
