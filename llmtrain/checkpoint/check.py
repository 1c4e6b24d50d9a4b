"""Checks that a checkpoint is what was written, before any of it is loaded."""

from __future__ import annotations

import zipfile
from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.checkpoint.folder import read_checkpoint
from llmtrain.checkpoint.manifest import (
    PATTERN,
    File,
    Manifest,
    first_names,
    missing_parts,
    read_manifests,
    size_problem,
)
from llmtrain.errors import CheckpointError, Problem
from llmtrain.system.durable import fingerprint
from llmtrain.system.untrusted import file_fault, open_regular

if TYPE_CHECKING:
    from llmtrain.checkpoint.storage import Storage

KINDS = (".safetensors", ".json")
"""Suffixes of the files in a checkpoint."""
PICKLES = frozenset({".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"})
"""Suffixes by which libraries recognise pickles. Checkpoints contain none: loading a pickle runs the code that it
names."""
MOST_BYTES = 16 << 20
"""Size of the longest pickle, unpacked, that is inspected."""
THREADS = 8
"""Number of files that a rank reads in parallel; hashing releases the interpreter lock."""


def verify_checkpoint(folder: Path) -> list[Manifest]:
    """Checks everything in a folder, in one process, and returns its manifests.

    Raises CheckpointError with each file that is missing, damaged, or a pickle that would run code when loaded, and
    with each missing part.
    """
    manifests = read_manifests(folder)
    files = files_of(manifests)
    problems = _parts_missing(folder, manifests) + damage(folder, files.items()) + _unexpected_files(folder, files)
    if problems:
        raise CheckpointError(problems)
    return manifests


def verify_together(folder: Path, storage: Storage) -> tuple[list[Manifest], list[Problem]]:
    """Does the same as `verify_checkpoint` on all ranks, each of which reads its share.

    Returns the manifests of all parts and the problems, the same on every rank. Raises nothing.
    """
    from llmtrain.engines.runtime.agree import (  # loads torch, which the rest of this module does not need
        gather,
        gather_problems,
    )

    checkpoint = read_checkpoint(folder)
    manifests, problems = [*checkpoint.manifests], [*checkpoint.problems]
    files = files_of(manifests)
    files_of_rank = [(name, file) for name, file in files.items() if storage.reader_of(file.rank) == storage.rank]
    problems += damage(folder, files_of_rank)
    if storage.is_leader:
        problems += [problem for problem in _unexpected_files(folder, files) if _would_be_read(problem)]
    parts = {manifest.part: manifest for manifests in gather(manifests) for manifest in manifests}
    problems = gather_problems(problems)
    if len({manifest.save for manifest in parts.values()}) > 1:
        problems.append(Problem("checkpoint.mixed", str(folder), "is not the same checkpoint on all nodes"))
    elif parts and not problems:
        problems = _parts_missing(folder, list(parts.values()))
    return list(parts.values()), problems


def files_of(manifests: Iterable[Manifest]) -> dict[str, File]:
    """Returns the files of all these parts by name."""
    return {name: file for manifest in manifests for name, file in manifest.files.items()}


def damage(folder: Path, files: Iterable[tuple[str, File]]) -> list[Problem]:
    """Returns what is wrong with files: their size or their hash."""
    with ThreadPoolExecutor(THREADS) as pool:
        problems = pool.map(lambda item: _compare(folder / item[0], item[1]), files)
        return [problem for problem in problems if problem]


def _compare(path: Path, expected: File) -> Problem | None:
    if problem := size_problem(path, expected):
        return problem
    try:
        if fingerprint(path) != expected.fingerprint:
            return Problem("checkpoint.hash", str(path), "was changed since it was written (its hash differs)")
    except OSError as error:
        return Problem("checkpoint.read", str(path), f"cannot be read: {file_fault(error)}")
    return None


def _unexpected_files(folder: Path, files: Container[str]) -> list[Problem]:
    """Returns the files that do not belong in a checkpoint: pickles, other kinds, and those that no manifest lists."""
    problems = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_dir() and not path.is_symlink():
            continue
        if path.suffix.lower() in PICKLES:
            problems.append(_pickle_problem(path))
        elif name.as_posix() not in files:
            if len(name.parts) > 1 or not name.match(PATTERN):
                fix = "move it out of the checkpoint"
                problems.append(Problem("checkpoint.unlisted", str(path), "is not in the manifest", fix))
        elif path.suffix not in KINDS:
            message = f"has none of the suffixes {' and '.join(KINDS)} of a checkpoint's files"
            problems.append(Problem("checkpoint.kind", str(path), message, "do not use this checkpoint"))
    return problems


def _would_be_read(problem: Problem) -> bool:
    """Whether the problem concerns a run that continues from here. Files that a user added do not."""
    return problem.rule != "checkpoint.unlisted" or problem.field.endswith(".safetensors")


def _parts_missing(folder: Path, manifests: list[Manifest]) -> list[Problem]:
    hosts = missing_parts(manifests)
    if not hosts:
        return []
    message = f"lacks the part that was written on {first_names(hosts)}, which has its own disk"
    fix = "copy that part into the same folder, or run on the same nodes"
    return [Problem("checkpoint.part", str(folder), message, fix)]


def _pickle_problem(path: Path) -> Problem:
    """Reports what a pickle would call when loaded. Does not run it, and unpacks at most `MOST_BYTES`."""
    import torch

    try:
        _check_size(path)
        named = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
        would = f"; it would call {', '.join(named)} when loaded" if named else ""
    except Exception as error:  # whatever fails while a hostile archive is read
        would = f"; what it would call when loaded is unknown ({file_fault(error)})"
    return Problem(
        "checkpoint.pickle", str(path), f"is a pickle, but checkpoints contain no pickles{would}", "remove it"
    )


def _check_size(path: Path) -> None:
    with open_regular(path) as stream, zipfile.ZipFile(stream) as archive:
        if sum(file.file_size for file in archive.infolist() if file.filename.endswith(".pkl")) > MOST_BYTES:
            raise ValueError(f"it is longer than {MOST_BYTES:,} bytes when unpacked")
