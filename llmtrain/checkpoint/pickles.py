"""Pickles in a checkpoint: we write none, and loading one runs what it names, so one that is there is refused."""

from __future__ import annotations

from pathlib import Path

from llmtrain.errors import Problem

SUFFIXES = frozenset({".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"})
"""What libraries take for a pickle by its name."""


def pickle_problem(path: Path) -> Problem:
    """Says what a pickle would call when somebody loads it. Runs none of it."""
    import torch

    try:
        named = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
        would = f"; it would call {', '.join(named)} when loaded" if named else ""
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        would = f"; what it would call when loaded cannot be told ({error})"
    return Problem("checkpoint.pickle", str(path), f"is a pickle, of which a checkpoint has none{would}", "remove it")
