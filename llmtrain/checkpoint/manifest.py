"""The manifest of a checkpoint: what it is, which run it belongs to, and the size and hash of each file."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from llmtrain.errors import CheckpointError, Problem
from llmtrain.system.durable import FileHash, write_atomically
from llmtrain.system.untrusted import UNREADABLE, file_fault, open_regular, read_json

T = TypeVar("T")
PATTERN = "MANIFEST*.json"
MOST_PARTS = 100_000
MOST_NAMED = 5

Count = Annotated[int, Field(ge=0, lt=2**63)]
Word = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A single line of text."""


def _within(name: str) -> str:
    parts = name.split("/")
    if not name.isprintable() or len(name) > 1024 or PurePosixPath(name).is_absolute() or {"", ".", ".."} & {*parts}:
        raise ValueError(f"{name[:100]!r} is not the path of a file within a checkpoint")
    return name


FileName = Annotated[str, AfterValidator(_within)]
"""Path of a file relative to its checkpoint, with slashes."""


class File(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bytes: Count
    xxh3_128: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Hash of the content, in hexadecimal."""
    rank: Count
    """The rank that wrote it."""
    private: bool
    """Whether only that rank reads it when the run continues."""

    @property
    def fingerprint(self) -> FileHash:
        """The expected fingerprint of the file."""
        return FileHash(self.bytes, self.xxh3_128)


class Manifest(BaseModel):
    """One part of a checkpoint: the files on one file system. With a shared file system there is only one part."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1] = 1
    save: Word
    """Identity of this save, which the parts of a checkpoint share."""
    part: Count
    """Index of this part, from 0."""
    hosts: Annotated[list[Word], Field(min_length=1, max_length=MOST_PARTS)]
    """For each part, the machine on which its manifest was written."""
    run: Word
    """Identity of the run that wrote it."""
    recipe: Word
    """Digest of the fields that a run may not change (`run_dir.identity_of`)."""
    step: Count
    """Number of optimizer steps taken."""
    samples: Count
    """Number of sequences consumed."""
    eval_loss: float | None
    """Loss of the evaluation right after this step, in nats per token; None if there was none."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """All metrics of that evaluation, by name."""
    ended: str = ""
    """Why the run has ended with this step, before its last one; empty if it has not."""
    written: Word
    """Time of writing in UTC, ISO 8601 with microseconds; it orders the checkpoints of a run."""
    world_size: Annotated[Count, Field(gt=0)]
    """Number of ranks that wrote it."""
    layout: dict[Word, int | Word | bool]
    """The values that determine how the state is divided into files (`state.layout_of`)."""
    versions: dict[Word, Word]
    """Versions of the packages that wrote it."""
    files: dict[FileName, File]
    """Every file of this part except the manifests, by its path in the checkpoint."""

    @model_validator(mode="after")
    def _is_one_of_its_parts(self) -> Self:
        if self.part >= len(self.hosts):
            raise ValueError(f"is part {self.part} of {len(self.hosts)}")
        return self

    @property
    def file_name(self) -> str:
        """Name of the manifest; it differs between parts, so that they can be copied into one folder."""
        return "MANIFEST.json" if len(self.hosts) == 1 else f"MANIFEST.{self.part}.json"

    @property
    def bytes(self) -> int:
        """Total size of the files of this part."""
        return sum(file.bytes for file in self.files.values())

    def write(self, folder: Path) -> None:
        """Writes the manifest atomically, as the last file of a checkpoint. Raises OSError."""
        write_atomically(folder / self.file_name, self.model_dump_json(indent=1) + "\n")


def manifest_files(folder: Path) -> list[Path]:
    """Returns the manifests in a folder: one for each part that is here; none if the folder does not exist."""
    try:
        return sorted(folder.glob(PATTERN))
    except UNREADABLE:
        return []


def read_manifests(folder: Path) -> list[Manifest]:
    """Reads the parts of a checkpoint in a folder.

    Raises CheckpointError if there is none, if one cannot be read, or if they belong to different saves.
    """
    manifests = [read_checkpoint_json(path, Manifest, "checkpoint.manifest") for path in manifest_files(folder)]
    if not manifests:
        raise CheckpointError(Problem("checkpoint.incomplete", str(folder), _why_none(folder)))
    if len({manifest.save for manifest in manifests}) > 1:
        raise CheckpointError(Problem("checkpoint.mixed", str(folder), "contains parts of different checkpoints"))
    return manifests


def read_checkpoint_json(path: Path, kind: type[T], rule: str) -> T:
    """Reads a JSON document of a checkpoint. Raises CheckpointError by `rule` if it cannot be read."""
    try:
        return read_json(path, kind)
    except UNREADABLE as error:
        raise CheckpointError(Problem(rule, str(path), f"cannot be read: {file_fault(error)}")) from None


def _why_none(folder: Path) -> str:
    try:
        next(folder.iterdir(), None)
    except NotADirectoryError:
        return "is not a folder, so it is not a checkpoint"
    except UNREADABLE as error:
        return f"cannot be read: {file_fault(error)}"
    return "has no manifest, so it is incomplete"


def already_taken(folder: Path, step: int, max_steps: int | None) -> str | None:
    """Returns why `--max-steps` leaves nothing to train after the checkpoint of `step`, or None."""
    if max_steps is None or step < max_steps:
        return None
    return f"{folder} has already taken {step:,} steps, and --max-steps is {max_steps:,}"


def missing_parts(manifests: list[Manifest]) -> list[str]:
    """Returns the machines whose parts are not among these."""
    here = {manifest.part for manifest in manifests}
    return [host for part, host in enumerate(manifests[0].hosts) if part not in here]


def size_problem(path: Path, expected: File) -> Problem | None:
    """Returns what is wrong with the size of a file, or why it cannot be opened; None if nothing is."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return Problem("checkpoint.missing", str(path), "is in the manifest but does not exist")
    except OSError as error:
        return Problem("checkpoint.read", str(path), f"cannot be read: {file_fault(error)}")
    if size != expected.bytes:
        return Problem("checkpoint.size", str(path), f"has {size} bytes, but the manifest says {expected.bytes}")
    return None


def first_names(names: list[str]) -> str:
    """Formats names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
