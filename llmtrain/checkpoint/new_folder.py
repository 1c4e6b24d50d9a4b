"""A folder that is made whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtrain.durable import flush_tree, remove_tree, rename
from llmtrain.errors import CheckpointError, Problem
from llmtrain.untrusted import UNREADABLE, why


def check_new(out: Path) -> None:
    """Raises CheckpointError where there is something already, or nobody may look."""
    try:
        is_taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except UNREADABLE as error:
        raise CheckpointError(Problem("out.write", str(out), why(error), "name another folder")) from None
    if is_taken:
        raise CheckpointError(Problem("out.exists", str(out), "is not empty", "name a new folder"))


@contextmanager
def new_folder(out: Path, replace: bool = False) -> Iterator[Path]:
    """A folder under a temporary name, which becomes `out` when the context ends and is gone where it fails.

    replace: take the place of a folder with content; `out` is the old one, the new one, or not there, but never a part.
    Raises CheckpointError for what the filesystem refuses.
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
        raise CheckpointError(Problem("out.write", str(out), message, "name another folder")) from error
    finally:
        if temporary.is_dir():
            remove_tree(temporary)
