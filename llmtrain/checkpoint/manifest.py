"""What a checkpoint says of itself: what it is, whose it is, and what each of its files must be."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from llmtrain.durable import Fingerprint, write_atomically
from llmtrain.errors import CheckpointError, Problem

PATTERN = "MANIFEST*.json"


class File(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    bytes: int
    xxh3_128: str
    """Hash of the content, hexadecimal."""
    rank: int
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
    save: str
    """Identity of this save; the parts of a checkpoint have the same."""
    part: int
    """Which part this is, from 0."""
    hosts: list[str]
    """Of each part, the machine that its manifest was written on."""
    run: str
    """Identity of the run that wrote it."""
    recipe: str
    """Digest of what a run may not change (`run_dir.identity_of`)."""
    step: int
    """Optimizer steps taken."""
    samples: int
    """Sequences consumed."""
    eval_loss: float | None
    """Evaluation after this very step, in nats per token; None where there was none."""
    written: str
    """UTC, ISO 8601 with microseconds; orders the checkpoints of a run."""
    world_size: int
    """Ranks that wrote it."""
    layout: dict[str, int | str | bool]
    """What decides how the state is cut into files (`state.layout_of`)."""
    versions: dict[str, str]
    """Of the packages that wrote it."""
    files: dict[str, File]
    """Every file of this part but the manifests, by its path in the checkpoint."""

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
    """The manifests of a folder: one, or that of each part that is here."""
    return sorted(folder.glob(PATTERN))


def read_manifests(folder: Path) -> list[Manifest]:
    """The parts of a checkpoint that lie in a folder.

    Raises CheckpointError where there is none, where one cannot be read, or where they are of different saves.
    """
    manifests = [_read(path) for path in manifest_files(folder)]
    if not manifests:
        raise CheckpointError(Problem("checkpoint.incomplete", str(folder), "has no manifest, so it is not whole"))
    if len({one.save for one in manifests}) > 1:
        problem = Problem("checkpoint.mixed", str(folder), "holds parts of different checkpoints")
        raise CheckpointError(problem)
    return manifests


def _read(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        found = str(error.strerror)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        found = f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}"
    raise CheckpointError(Problem("checkpoint.manifest", str(path), f"cannot be read: {found}"))


def missing_parts(manifests: list[Manifest]) -> list[str]:
    """The machines whose parts are not among these."""
    here = {one.part for one in manifests}
    return [host for part, host in enumerate(manifests[0].hosts) if part not in here]
