"""Pickles in a checkpoint: we write none, and loading one runs what it names, so one that is there is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

from llmtrain.errors import Problem
from llmtrain.untrusted import open_regular, why

SUFFIXES = frozenset({".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"})
"""What libraries take for a pickle by its name."""
MOST_BYTES = 16 << 20
"""Longest pickle that is looked into, as it is when it is unpacked."""


def pickle_problem(path: Path) -> Problem:
    """Says what a pickle would call when somebody loads it. Runs none of it, and unpacks no more than a little."""
    import torch

    try:
        _check_size(path)
        named = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
        would = f"; it would call {', '.join(named)} when loaded" if named else ""
    except Exception as error:  # whatever the readers of a hostile archive make of it
        would = f"; what it would call when loaded cannot be told ({why(error)})"
    return Problem("checkpoint.pickle", str(path), f"is a pickle, of which a checkpoint has none{would}", "remove it")


def _check_size(path: Path) -> None:
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        if sum(one.file_size for one in archive.infolist() if one.filename.endswith(".pkl")) > MOST_BYTES:
            raise ValueError(f"it is longer than {MOST_BYTES:,} bytes when it is unpacked")
