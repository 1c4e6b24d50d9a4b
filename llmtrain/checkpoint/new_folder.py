"""A folder that is created complete or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtrain.durable import flush_tree, remove_tree, rename
from llmtrain.errors import CheckpointError, Problem
from llmtrain.untrusted import UNREADABLE, why


def check_new(out: Path) -> None:
    """Raises CheckpointError if something exists there already, or the folder is not accessible."""
    try:
        is_taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except UNREADABLE as error:
        raise CheckpointError(Problem("out.write", str(out), why(error), "choose another folder")) from None
    if is_taken:
        raise CheckpointError(Problem("out.exists", str(out), "is not empty", "choose a new folder"))


@contextmanager
def new_folder(out: Path, replace: bool = False) -> Iterator[Path]:
    """Yields a folder under a temporary name, which is renamed to `out` at the end, and removed on failure.

    replace: whether to replace a folder with content; `out` is the old folder, the new one, or absent, but never
    partial. Raises CheckpointError for errors of the file system.
    """
    out = out.absolute()
    temporary, replaced = (out.with_name(f".{out.name}.{what}") for what in ("partial", "replaced"))
    try:
        remove_tree(temporary)
        remove_tree(replaced)
        temporary.mkdir(parents=True)
        yield temporary
        flush_tree(temporary)
        if replace and out.exists():
            rename(out, replaced)
        elif out.exists():
            out.rmdir()
        rename(temporary, out)
        remove_tree(replaced)
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise CheckpointError(Problem("out.write", str(out), message, "choose another folder")) from error
    finally:
        if temporary.is_dir():
            remove_tree(temporary)
