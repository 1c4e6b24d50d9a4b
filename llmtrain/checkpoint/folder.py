"""A checkpoint as a folder: its name, its manifest, and the rename that makes it exist.

A checkpoint is built under a temporary name, flushed to the disk, and renamed once; `latest` is
replaced by a rename as well. So at any instant `latest` names a whole checkpoint or none.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmtrain.durable import flush, flush_tree, write_atomically
from llmtrain.errors import CheckpointError, Problem

MANIFEST = "MANIFEST.json"
LATEST = "latest"
_NAME = re.compile(r"step_(\d{8})")


def step_folder(checkpoints: Path, step: int) -> Path:
    """Folder of the checkpoint after `step`."""
    return checkpoints / f"step_{step:08d}"


def temporary_folder(checkpoints: Path, step: int) -> Path:
    """Where that checkpoint is built; never read, and replaced by the next attempt."""
    return checkpoints / f".step_{step:08d}.partial"


def step_of(folder: Path) -> int:
    """The step of a checkpoint folder's name. Raises CheckpointError for any other name."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise CheckpointError(
            Problem("checkpoint.name", str(folder), "is not a checkpoint folder", "give one such as step_00000500")
        )
    return int(match.group(1))


def whole(checkpoints: Path) -> list[Path]:
    """The checkpoints that were renamed into place, in the order they were written.

    Not in the order of their steps: a run that was taken back to an older checkpoint writes on from there.
    """
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: ((path / MANIFEST).stat().st_mtime_ns, path.name))


def newest(checkpoints: Path) -> Path | None:
    """The checkpoint that `latest` names, else the newest whole one, else None."""
    latest = checkpoints / LATEST
    if latest.is_file():
        named = checkpoints / latest.read_text().strip()
        if _NAME.fullmatch(named.name) and (named / MANIFEST).is_file():
            return named
    found = whole(checkpoints)
    return found[-1] if found else None


def publish(temporary: Path, step: int) -> Path:
    """Writes the manifest of a finished folder, renames it into place and points `latest` at it. One rank only."""
    checkpoints = temporary.parent
    final = step_folder(checkpoints, step)
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    manifest = {"step": step, "files": {str(path.relative_to(temporary)): _fingerprint(path) for path in files}}
    flush_tree(temporary)
    write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=1))
    if final.exists():
        # Saved again after a rollback; the new one replaces the old one, which stays until here.
        shutil.rmtree(final)
    temporary.rename(final)
    flush(checkpoints)
    write_atomically(checkpoints / LATEST, final.name + "\n")
    return final


def verify(folder: Path) -> None:
    """Compares every file with the manifest. Raises CheckpointError naming each one that is missing or damaged."""
    manifest = _read_manifest(folder)
    expected: dict[str, dict[str, str | int]] = manifest["files"]  # type: ignore[assignment]
    with ThreadPoolExecutor() as pool:
        problems = list(pool.map(lambda item: _compare(folder / item[0], item[1]), expected.items()))
    found = [problem for problem in problems if problem]
    if found:
        raise CheckpointError(found)


def prune(checkpoints: Path, keep_last: int | None) -> None:
    """Deletes all but the last `keep_last` whole checkpoints that were written."""
    if keep_last is not None:
        for folder in whole(checkpoints)[:-keep_last]:
            shutil.rmtree(folder)


def _fingerprint(path: Path) -> dict[str, str | int]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "blake2b": hashlib.file_digest(file, "blake2b").hexdigest()}


def _compare(path: Path, expected: dict[str, str | int]) -> Problem | None:
    if not path.is_file():
        return Problem("checkpoint.missing", str(path), "is in the manifest but not there")
    size = path.stat().st_size
    if size != expected["bytes"]:
        return Problem("checkpoint.size", str(path), f"has {size} bytes, the manifest says {expected['bytes']}")
    if _fingerprint(path) != expected:
        return Problem("checkpoint.hash", str(path), "was changed since it was written (its hash differs)")
    return None


def _read_manifest(folder: Path) -> dict[str, object]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, object] = json.loads(path.read_text())
        if not isinstance(manifest["files"], dict):
            raise TypeError("files is not an object")
    except FileNotFoundError:
        problem = Problem("checkpoint.incomplete", str(folder), "has no MANIFEST.json, so it was never finished")
        raise CheckpointError(problem) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(Problem("checkpoint.manifest", str(path), f"cannot be read: {error}")) from None
    return manifest
