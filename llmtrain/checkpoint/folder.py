"""A checkpoint as a folder: its name, and the renames that create and remove it.

A checkpoint is built under a temporary name, flushed to disk, and renamed once; `latest` is replaced by a rename too.
Deletion begins with a rename. A folder with the name of a checkpoint is therefore complete, unless another program has
damaged it. Folders for people, such as an export, are created complete or not at all, too.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmtrain.checkpoint.manifest import Manifest, read_manifests
from llmtrain.errors import CheckpointError, Problem
from llmtrain.recipe import CheckpointConfig
from llmtrain.system.durable import flush, flush_folders, flush_tree, remove_tree, rename, write_atomically
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_json, read_text

LATEST = "latest"
STATE_FILE = "trainer.json"
PLAN_FILE = "plan.json"
EXPORTED_FILE = "llmtrain.json"
"""In an exported folder: identifies the checkpoint that it was made from."""
MOST_LATEST_BYTES = 4096
_NAME = re.compile(r"step_([0-9]{8,100})")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder with the name of a checkpoint, and its manifests."""

    folder: Path
    manifests: tuple[Manifest, ...]
    """Empty if they are missing or cannot be read."""
    problems: tuple[Problem, ...] = ()
    """Why `manifests` is empty."""

    @property
    def written(self) -> str:
        """Time of writing; an empty string, which sorts first, if it cannot be read."""
        return self.manifests[0].written if self.manifests else ""

    def metric(self, name: str) -> float | None:
        """Returns a metric of the evaluation after the same step; None if there was none, or it is not finite."""
        if not self.manifests:
            return None
        first = self.manifests[0]
        return {"eval_loss": first.eval_loss, **first.metrics}.get(name)


def step_folder(checkpoints: Path, step: int) -> Path:
    """Returns the folder of the checkpoint after `step`."""
    return checkpoints / f"step_{step:08d}"


def step_of(name: str) -> int:
    """Returns the step in the name of a checkpoint."""
    return int(name.removeprefix("step_"))


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder with this name is a checkpoint."""
    return _NAME.fullmatch(name) is not None


def find(checkpoints: Path) -> list[FoundCheckpoint]:
    """Returns every folder with the name of a checkpoint, in the order they were written.

    This may differ from the order of their steps: a run that was taken back to an older checkpoint continues from
    there. Raises CheckpointError if the folder cannot be read.
    """
    try:
        folders = [path for path in checkpoints.iterdir() if is_checkpoint_name(path.name)]
    except FileNotFoundError:
        return []
    except UNREADABLE as error:
        raise CheckpointError(
            Problem("checkpoint.folder", str(checkpoints), f"cannot be read: {file_fault(error)}")
        ) from None
    return sorted(map(read_checkpoint, folders), key=lambda checkpoint: (checkpoint.written, checkpoint.folder.name))


def readable(checkpoints: Path) -> list[Path]:
    """Returns the checkpoints with a readable manifest, in the order they were written."""
    return [checkpoint.folder for checkpoint in find(checkpoints) if checkpoint.manifests]


def newest(checkpoints: Path) -> Path | None:
    """Returns the checkpoint that `latest` names, else the newest one, else None."""
    folders = readable(checkpoints)
    named, _ = read_latest(checkpoints)
    return next((folder for folder in folders if folder.name == named), folders[-1] if folders else None)


def best_first(found: Iterable[FoundCheckpoint], config: CheckpointConfig) -> list[FoundCheckpoint]:
    """Returns the checkpoints that were evaluated after the same step, the best first (`checkpoint.best_metric`)."""
    values = [(checkpoint.metric(config.best_metric), checkpoint) for checkpoint in found]
    sign = -1 if config.best_mode == "max" else 1
    return [
        checkpoint
        for _, checkpoint in sorted(
            ((sign * value, checkpoint) for value, checkpoint in values if value is not None), key=itemgetter(0)
        )
    ]


def faults(checkpoints: Path) -> list[Problem]:
    """Returns what is wrong with `latest` and with unreadable checkpoints, which `newest` does not choose."""
    found = find(checkpoints)
    named, problems = read_latest(checkpoints)
    if named is not None and named not in {checkpoint.folder.name for checkpoint in found}:
        problems = [latest_is_gone(checkpoints, named)]
    return [*problems, *(problem for checkpoint in found for problem in checkpoint.problems)]


def read_latest(checkpoints: Path) -> tuple[str | None, list[Problem]]:
    """Returns the name in `latest`, or None if it is missing or unreadable, and the problems of the file."""
    path = checkpoints / LATEST
    try:
        name = read_text(path, MOST_LATEST_BYTES).strip()
        if not is_checkpoint_name(name):
            raise ValueError(f"contains {name[:40]!r}, which is not the name of a checkpoint")
    except FileNotFoundError:
        return None, []
    except UNREADABLE as error:
        return None, [Problem("checkpoint.latest", str(path), f"cannot be used: {file_fault(error)}")]
    return name, []


def latest_is_gone(checkpoints: Path, named: str) -> Problem:
    """Returns the problem that `latest` names a checkpoint that does not exist."""
    return Problem("checkpoint.latest", str(checkpoints / LATEST), f"names {named}, which does not exist")


def point_latest(checkpoints: Path, name: str) -> None:
    """Makes `latest` name a checkpoint. Raises OSError."""
    path = checkpoints / LATEST
    if path.is_dir() and not path.is_symlink():  # created by another program; a file cannot replace it
        rename(path, path.with_name(f"{LATEST}.replaced-{uuid.uuid4().hex[:8]}"))
    write_atomically(path, name + "\n")


def write_exported(export: Path, checkpoint: Manifest) -> None:
    """Writes to an exported folder which checkpoint it was made from."""
    about = {"run": checkpoint.run, "step": checkpoint.step, "save": checkpoint.save}
    (export / EXPORTED_FILE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def is_exported(export: Path, checkpoint: Manifest) -> bool:
    """Whether a folder was exported from exactly this checkpoint."""
    try:
        return read_json(export / EXPORTED_FILE, dict[str, Any]).get("save") == checkpoint.save
    except UNREADABLE:
        return False


class CheckpointBuilder:
    """Builds a checkpoint under a temporary name. One rank of each file system calls the methods, in their order.

    All of them raise OSError.
    """

    def __init__(self, checkpoints: Path, step: int, run: str) -> None:
        self.checkpoints = checkpoints
        self.run = run
        self.final = step_folder(checkpoints, step)
        # The run's id in the name shows that the remains of a killed save are ours.
        self.folder = checkpoints / f".{self.final.name}.partial-{run}"

    def start(self) -> None:
        """Creates the temporary folder, and removes the remains of killed saves and deletions."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        flush(self.checkpoints.parent)
        run = re.escape(self.run)
        for left in self.checkpoints.iterdir():
            if re.fullmatch(rf"\.step_\d+\.((partial|deleted)-{run}|view-\w+)", left.name):
                remove_tree(left)
            elif re.fullmatch(rf"\.(probe-\w+-\d+|{LATEST}\.\w+)", left.name):
                left.unlink(missing_ok=True)
        self.folder.mkdir()

    def finish(self, manifest: Manifest) -> None:
        """Flushes the names of the files to disk, then writes the manifest, which makes the folder complete."""
        flush_folders(self.folder, manifest.files)
        manifest.write(self.folder)

    def publish(self) -> None:
        """Gives the folder its final name.

        A run that was taken back may find an older checkpoint of the same step, which is not the one that `latest`
        names. It is deleted, or renamed if it may belong to another run.
        """
        if not self.final.exists():
            rename(self.folder, self.final)
            return
        manifests = read_checkpoint(self.final).manifests
        ours = bool(manifests) and manifests[0].run == self.run
        name = self._deleted_name(self.final.name) if ours else f"{self.final.name}.replaced-{uuid.uuid4().hex[:8]}"
        aside = self.final.with_name(name)
        if ours:
            remove_tree(aside)
        rename(self.final, aside)
        rename(self.folder, self.final)
        if ours:
            remove_tree(aside)

    def abandon(self) -> None:
        """Removes what a failed save has written, as far as possible."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def prune(self, names: list[str]) -> None:
        """Deletes checkpoints of this run. Each is renamed first, so that a partial one is never found."""
        for name in names:
            folder = self.checkpoints / name
            if folder.is_dir():
                deleted = folder.with_name(self._deleted_name(name))
                remove_tree(deleted)
                rename(folder, deleted)
                remove_tree(deleted)

    def _deleted_name(self, name: str) -> str:
        return f".{name}.deleted-{self.run}"


def read_checkpoint(folder: Path) -> FoundCheckpoint:
    """Reads the manifests of a folder; if they cannot be read, returns the problems instead."""
    try:
        return FoundCheckpoint(folder, tuple(read_manifests(folder)))
    except CheckpointError as error:
        return FoundCheckpoint(folder, (), error.problems)


def check_new(out: Path) -> None:
    """Raises CheckpointError if something exists there already, or the folder is not accessible."""
    try:
        is_taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except UNREADABLE as error:
        raise CheckpointError(Problem("out.write", str(out), file_fault(error), "choose another folder")) from None
    if is_taken:
        raise CheckpointError(Problem("out.exists", str(out), "is not empty", "choose a new folder"))


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yields a new hidden folder for intermediate files, which is removed at the end.

    Those of killed processes with the same name are removed at the start: nobody holds a lock on them.
    """
    for left in parent.glob(f".{escape(name)}-????????"):
        with suppress(OSError), _locked(left):
            remove_tree(left)
    with TemporaryDirectory(dir=parent, prefix=f".{name}-") as folder, _locked(Path(folder)):
        yield Path(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a lock on a folder. Raises OSError if another process does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(out: Path, replace: bool = False) -> Iterator[Path]:
    """Yields a folder under a temporary name, which is renamed to `out` at the end, and removed on failure.

    replace: whether to replace a folder with content; `out` is the old folder, the new one, or absent, but never
    partial. Raises CheckpointError for errors of the file system.
    """
    out = out.absolute()
    temporary, replaced = (out.with_name(f".{out.name}.{what}") for what in ("partial", "replaced"))
    try:
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            raise OSError(errno.ENOTDIR, "is not a folder", str(out))
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
