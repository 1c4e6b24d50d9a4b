"""Pickles in a checkpoint: we write none, and loading one runs the code that it names, so they are refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

from llmtrain.errors import Problem
from llmtrain.untrusted import open_regular, why

SUFFIXES = frozenset({".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"})
"""Suffixes by which libraries recognise pickles."""
MOST_BYTES = 16 << 20
"""Size of the longest pickle, unpacked, that is inspected."""


def pickle_problem(path: Path) -> Problem:
    """Reports what a pickle would call when loaded. Runs none of it, and unpacks at most `MOST_BYTES`."""
    import torch

    try:
        _check_size(path)
        named = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
        would = f"; it would call {', '.join(named)} when loaded" if named else ""
    except Exception as error:  # whatever fails while a hostile archive is read
        would = f"; what it would call when loaded is unknown ({why(error)})"
    return Problem(
        "checkpoint.pickle", str(path), f"is a pickle, but checkpoints contain no pickles{would}", "remove it"
    )


def _check_size(path: Path) -> None:
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        if sum(one.file_size for one in archive.infolist() if one.filename.endswith(".pkl")) > MOST_BYTES:
            raise ValueError(f"it is longer than {MOST_BYTES:,} bytes when unpacked")
