"""Chooses the checkpoint that a run continues from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmtrain.checkpoint.check import verify_together
from llmtrain.checkpoint.folder import find, latest_is_gone, point_latest, read_latest, step_of
from llmtrain.checkpoint.manifest import Manifest
from llmtrain.checkpoint.storage import Storage
from llmtrain.engines.runtime.agree import attempt, gather, raise_together
from llmtrain.errors import CheckpointError, Problem
from llmtrain.recipe import Recipe
from llmtrain.run_dir import RunDir, identity_of


@dataclass(frozen=True)
class ResumeChoice:
    """A verified checkpoint, and why newer ones were not chosen."""

    folder: Path
    manifests: list[Manifest]
    rejected: tuple[Problem, ...]
    """Problems of newer checkpoints."""


def choose(resume: str, run_dir: RunDir, run: str, recipe: Recipe, storage: Storage) -> ResumeChoice | None:
    """Returns the verified checkpoint to continue from, or None for a new run. Called by all ranks.

    resume: `auto`, `never` or a checkpoint folder. run: the run's id. Raises CheckpointError.
    """
    if resume == "never":
        return None
    if resume == "auto":
        return choose_newest(run_dir.checkpoints, run, storage)
    return choose_named(Path(resume), run, identity_of(recipe), storage)


def choose_newest(checkpoints: Path, run: str, storage: Storage, before: int | None = None) -> ResumeChoice | None:
    """Returns the newest checkpoint of a run that is complete on all nodes, or None if the run has never had one.

    before: only consider checkpoints saved before this step. Called by all ranks. Raises CheckpointError if there are
    or were checkpoints and none is usable: the run must then not start from scratch.
    """
    names, rejected = _candidates(checkpoints, storage)
    if before is not None:
        names, rejected = [name for name in names if step_of(name) < before], []
    for name in names:
        folder = checkpoints / name
        manifests, problems = verify_together(folder, storage)
        if not problems and manifests[0].run != run:
            problems = [Problem("checkpoint.run", str(folder), f"was written by another run, {manifests[0].run}")]
        if not problems:
            return ResumeChoice(folder, manifests, tuple(rejected))
        rejected += problems
    if rejected:
        fix = "restore one of them, or start a new run with another --run-dir"
        raise CheckpointError(
            [*rejected, Problem("checkpoint.none", str(checkpoints), "contains no complete checkpoint", fix)]
        )
    return None


def choose_named(folder: Path, run: str, recipe: str, storage: Storage) -> ResumeChoice:
    """Returns the checkpoint that a user has named, of this run or of another run with the same recipe.

    recipe: digest of the fields that a run may not change. Called by all ranks. Raises CheckpointError if it is not
    usable.
    """
    manifests, problems = verify_together(folder, storage)
    if not problems and manifests[0].run != run and manifests[0].recipe != recipe:
        message = "was written by a run of a different recipe"
        fix = "export it and start from its weights with model.pretrained, or use the recipe of that run"
        problems = [Problem("checkpoint.recipe", str(folder), message, fix)]
    if problems:
        raise CheckpointError(problems)
    return ResumeChoice(folder, manifests, ())


def go_on_from(choice: ResumeChoice, checkpoints: Path, storage: Storage) -> None:
    """Makes `latest` name the checkpoint that training continues from, if it belongs to this run.

    A later checkpoint that is overwritten by a run that was taken back is then never the one that `latest` names.
    """
    problems: list[Problem] = []
    if choice.folder.resolve().parent == checkpoints.resolve() and storage.is_leader:
        problems = attempt(partial(point_latest, checkpoints, choice.folder.name), "write latest")
    raise_together(problems)


def _candidates(checkpoints: Path, storage: Storage) -> tuple[list[str], list[Problem]]:
    """Returns the names of all checkpoints on any node, in order of preference, and what is wrong with `latest`."""
    written: dict[str, str] = {}
    problems: list[Problem] = []
    latest: tuple[str | None, list[Problem]] = (None, [])
    if storage.is_leader:
        try:
            written = {checkpoint.folder.name: checkpoint.written for checkpoint in find(checkpoints)}
            latest = read_latest(checkpoints)
        except CheckpointError as error:
            problems = list(error.problems)
    raise_together(problems)
    by_rank = gather((written, *latest))
    times = {name: time for written, _, _ in by_rank for name, time in written.items()}
    named = next((name for _, name, _ in by_rank if name), None)
    unreadable = [problem for _, _, problems in by_rank for problem in problems]
    # Folders without a manifest come early: they cannot be used, but are reported.
    names = sorted(times, key=lambda name: (name == named, not times[name], times[name], name), reverse=True)
    if named and named not in times:
        unreadable.append(latest_is_gone(checkpoints, named))
    return names, list(dict.fromkeys(unreadable))
