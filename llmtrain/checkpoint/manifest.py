"""What a checkpoint says of itself: what it is, whose it is, and what each of its files must be."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from llmtrain.durable import Fingerprint, write_atomically
from llmtrain.errors import CheckpointError, Problem
from llmtrain.untrusted import UNREADABLE, open_regular, read_json, why

PATTERN = "MANIFEST*.json"
MOST_PARTS = 100_000
MOST_NAMED = 5

Count = Annotated[int, Field(ge=0, lt=2**63)]
Word = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A text of one line."""


def _within(name: str) -> str:
    parts = name.split("/")
    if not name.isprintable() or len(name) > 1024 or PurePosixPath(name).is_absolute() or {"", ".", ".."} & {*parts}:
        raise ValueError(f"{name[:100]!r} is no path of a file within a checkpoint")
    return name


FileName = Annotated[str, AfterValidator(_within)]
"""Path of a file relative to its checkpoint, with slashes."""


class File(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    bytes: Count
    xxh3_128: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Hash of the content, hexadecimal."""
    rank: Count
    """Who wrote it."""
    private: bool
    """Whether that rank is the only one that reads it when the run goes on."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What the file must be."""
        return Fingerprint(self.bytes, self.xxh3_128)


class Manifest(BaseModel):
    """One part of a checkpoint: that which lies on one filesystem. On a shared one there is only one part."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    schema_version: Literal[1] = 1
    save: Word
    """Identity of this save; the parts of a checkpoint have the same."""
    part: Count
    """Which part this is, from 0."""
    hosts: Annotated[list[Word], Field(min_length=1, max_length=MOST_PARTS)]
    """Of each part, the machine that its manifest was written on."""
    run: Word
    """Identity of the run that wrote it."""
    recipe: Word
    """Digest of what a run may not change (`run_dir.identity_of`)."""
    step: Count
    """Optimizer steps taken."""
    samples: Count
    """Sequences consumed."""
    eval_loss: float | None
    """Evaluation after this very step, in nats per token; None where there was none."""
    written: Word
    """UTC, ISO 8601 with microseconds; orders the checkpoints of a run."""
    world_size: Annotated[Count, Field(gt=0)]
    """Ranks that wrote it."""
    layout: dict[Word, int | Word | bool]
    """What decides how the state is cut into files (`state.layout_of`)."""
    versions: dict[Word, Word]
    """Of the packages that wrote it."""
    files: dict[FileName, File]
    """Every file of this part but the manifests, by its path in the checkpoint."""

    @model_validator(mode="after")
    def _is_one_of_its_parts(self) -> Self:
        if self.part >= len(self.hosts):
            raise ValueError(f"is part {self.part} of {len(self.hosts)}")
        return self

    @property
    def file_name(self) -> str:
        """Name of the manifest; parts have names of their own, so that they can be copied into one folder."""
        return "MANIFEST.json" if len(self.hosts) == 1 else f"MANIFEST.{self.part}.json"

    @property
    def bytes(self) -> int:
        """Size of the files of this part."""
        return sum(file.bytes for file in self.files.values())

    def write(self, folder: Path) -> None:
        """Writes it, atomically: the last file of a checkpoint. Raises OSError."""
        write_atomically(folder / self.file_name, self.model_dump_json(indent=1) + "\n")


def manifest_files(folder: Path) -> list[Path]:
    """The manifests of a folder: one, or that of each part that is here; none where there is no such folder."""
    try:
        return sorted(folder.glob(PATTERN))
    except UNREADABLE:
        return []


def read_manifests(folder: Path) -> list[Manifest]:
    """The parts of a checkpoint that lie in a folder.

    Raises CheckpointError where there is none, where one cannot be read, or where they are of different saves.
    """
    manifests = [_read(path) for path in manifest_files(folder)]
    if not manifests:
        raise CheckpointError(Problem("checkpoint.incomplete", str(folder), _why_none(folder)))
    if len({one.save for one in manifests}) > 1:
        problem = Problem("checkpoint.mixed", str(folder), "holds parts of different checkpoints")
        raise CheckpointError(problem)
    return manifests


def _read(path: Path) -> Manifest:
    try:
        return read_json(path, Manifest)
    except UNREADABLE as error:
        problem = Problem("checkpoint.manifest", str(path), f"cannot be read: {why(error)}")
    raise CheckpointError(problem)


def _why_none(folder: Path) -> str:
    try:
        next(folder.iterdir(), None)
    except NotADirectoryError:
        return "is no folder, so it is no checkpoint"
    except UNREADABLE as error:
        return f"cannot be read: {why(error)}"
    return "has no manifest, so it is not whole"


def already_taken(folder: Path, step: int, max_steps: int | None) -> str | None:
    """Why `--max-steps` leaves nothing to train after the checkpoint of `step`; None where it leaves something."""
    if max_steps is None or step < max_steps:
        return None
    return f"{folder} has taken {step:,} steps already, and --max-steps is {max_steps:,}"


def missing_parts(manifests: list[Manifest]) -> list[str]:
    """The machines whose parts are not among these."""
    here = {one.part for one in manifests}
    return [host for part, host in enumerate(manifests[0].hosts) if part not in here]


def size_problem(path: Path, expected: File) -> Problem | None:
    """What is wrong with a file as far as can be told without reading it."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return Problem("checkpoint.missing", str(path), "is in the manifest but not there")
    except OSError as error:
        return Problem("checkpoint.read", str(path), f"cannot be read: {why(error)}")
    if size != expected.bytes:
        return Problem("checkpoint.size", str(path), f"has {size} bytes, the manifest says {expected.bytes}")
    return None


def some(names: list[str]) -> str:
    """Names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
