"""Whether a checkpoint is what was written: asked before any of it is loaded."""

from __future__ import annotations

from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.checkpoint.manifest import PATTERN, File, Manifest, missing_parts, read_manifests, size_problem, some
from llmtrain.checkpoint.pickles import SUFFIXES, pickle_problem
from llmtrain.durable import fingerprint
from llmtrain.errors import CheckpointError, Problem
from llmtrain.untrusted import why

if TYPE_CHECKING:
    from llmtrain.checkpoint.storage import Storage

KINDS = (".safetensors", ".json")
"""Suffixes of what a checkpoint has."""
THREADS = 8
"""Files that a rank reads at once; hashing releases the interpreter lock."""


def verify(folder: Path) -> list[Manifest]:
    """Checks all that lies in a folder, in one process; returns its manifests.

    Raises CheckpointError naming each file that is missing or damaged, or that would run something when it
    is unpickled, and each part that is not here.
    """
    manifests = read_manifests(folder)
    files = files_of(manifests)
    problems = _parts_missing(folder, manifests) + damage(folder, files.items()) + _strange(folder, files)
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
        problems += [one for one in _strange(folder, files) if _would_be_read(one)]
    parts = {one.part: one for seen in gather(manifests) for one in seen}
    problems = united(problems)
    if len({one.save for one in parts.values()}) > 1:
        problems.append(Problem("checkpoint.mixed", str(folder), "is not the same checkpoint on all nodes"))
    elif parts and not problems:
        problems = _parts_missing(folder, list(parts.values()))
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
    if problem := size_problem(path, expected):
        return problem
    try:
        if fingerprint(path) != expected.fingerprint:
            return Problem("checkpoint.hash", str(path), "was changed since it was written (its hash differs)")
    except OSError as error:
        return Problem("checkpoint.read", str(path), f"cannot be read: {why(error)}")
    return None


def _strange(folder: Path, files: Container[str]) -> list[Problem]:
    """What a checkpoint of ours does not have: pickles, other kinds of files, and files that no manifest names."""
    problems = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_dir() and not path.is_symlink():
            continue
        if path.suffix.lower() in SUFFIXES:
            problems.append(pickle_problem(path))
        elif name.as_posix() not in files:
            if len(name.parts) > 1 or not name.match(PATTERN):
                fix = "move it out of the checkpoint"
                problems.append(Problem("checkpoint.unlisted", str(path), "is not in the manifest", fix))
        elif path.suffix not in KINDS:
            message = f"is neither of {' and '.join(KINDS)}, of which a checkpoint is made"
            problems.append(Problem("checkpoint.kind", str(path), message, "do not use this checkpoint"))
    return problems


def _would_be_read(problem: Problem) -> bool:
    """Whether a run that goes on from here meets it. Somebody's note beside a checkpoint is to cost no interval."""
    return problem.rule != "checkpoint.unlisted" or problem.field.endswith(".safetensors")


def _parts_missing(folder: Path, manifests: list[Manifest]) -> list[Problem]:
    hosts = missing_parts(manifests)
    if not hosts:
        return []
    message = f"lacks the part that was written on {some(hosts)}, which has a disk of its own"
    fix = "copy that part into the same folder, or run on the same nodes"
    return [Problem("checkpoint.part", str(folder), message, fix)]
