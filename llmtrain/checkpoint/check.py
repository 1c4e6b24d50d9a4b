"""Whether a checkpoint is what was written: asked before any of it is loaded."""

from __future__ import annotations

from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.checkpoint.manifest import File, Manifest, missing_parts, read_manifests
from llmtrain.checkpoint.pickles import SUFFIXES, pickle_problem
from llmtrain.durable import fingerprint
from llmtrain.errors import CheckpointError, Problem

if TYPE_CHECKING:
    from llmtrain.checkpoint.storage import Storage

THREADS = 8
"""Files that a rank reads at once; hashing releases the interpreter lock."""


def verify(folder: Path) -> list[Manifest]:
    """Checks all that lies in a folder, in one process; returns its manifests.

    Raises CheckpointError naming each file that is missing or damaged, or that would run something when it
    is unpickled, and each part that is not here.
    """
    manifests = read_manifests(folder)
    files = files_of(manifests)
    problems = [_part_missing(folder, host) for host in missing_parts(manifests)]
    problems += damage(folder, files.items()) + _strange(folder, files)
    if problems:
        raise CheckpointError(problems)
    return manifests


def verify_together(folder: Path, storage: Storage) -> tuple[list[Manifest], list[Problem]]:
    """The same by all ranks, each of which reads its share; returns the manifests of all parts, and the problems.

    Nothing is raised, and every rank is told the same.
    """
    from llmtrain.checkpoint.agree import gather, united  # loads torch, which nobody else here needs

    manifests, problems = _read(folder)
    files = files_of(manifests)
    own = [(name, file) for name, file in files.items() if storage.reader_of(file.rank) == storage.rank]
    problems += damage(folder, own)
    if storage.is_leader:
        problems += _strange(folder, files)
    parts = {one.part: one for seen in gather(manifests) for one in seen}
    problems = united(problems)
    if len({one.save for one in parts.values()}) > 1:
        problems.append(Problem("checkpoint.mixed", str(folder), "is not the same checkpoint on all nodes"))
    elif parts and not problems:
        problems = [_part_missing(folder, host) for host in missing_parts(list(parts.values()))]
    return list(parts.values()), problems


def files_of(manifests: Iterable[Manifest]) -> dict[str, File]:
    """The files of all these parts by their names."""
    return {name: file for manifest in manifests for name, file in manifest.files.items()}


def damage(folder: Path, files: Iterable[tuple[str, File]]) -> list[Problem]:
    """What is wrong with files: their size, their hash, or what their pickles name."""
    with ThreadPoolExecutor(THREADS) as pool:
        problems = pool.map(lambda item: _compare(folder / item[0], item[1]), files)
        return [problem for problem in problems if problem]


def _read(folder: Path) -> tuple[list[Manifest], list[Problem]]:
    try:
        return read_manifests(folder), []
    except CheckpointError as error:
        return [], list(error.problems)


def _compare(path: Path, expected: File) -> Problem | None:
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return Problem("checkpoint.size", str(path), f"has {size} bytes, the manifest says {expected.bytes}")
        if fingerprint(path) != expected.fingerprint:
            return Problem("checkpoint.hash", str(path), "was changed since it was written (its hash differs)")
    except FileNotFoundError:
        return Problem("checkpoint.missing", str(path), "is in the manifest but not there")
    except OSError as error:
        return Problem("checkpoint.read", str(path), f"cannot be read: {error.strerror}")
    return None


def _strange(folder: Path, files: Container[str]) -> list[Problem]:
    """Pickles, and pieces that no manifest knows: those are found by their names, and would be taken for ours."""
    problems = [pickle_problem(path) for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES]
    return problems + [
        Problem("checkpoint.unlisted", str(path), "is not in the manifest", "move it out of the checkpoint")
        for path in sorted(folder.rglob("*.safetensors"))
        if path.relative_to(folder).as_posix() not in files
    ]


def _part_missing(folder: Path, host: str) -> Problem:
    return Problem(
        "checkpoint.part",
        str(folder),
        f"lacks the part that was written on {host}, which has a disk of its own",
        "copy that part into the same folder, or run on the same nodes",
    )
