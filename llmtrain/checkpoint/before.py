"""Checks of a resume before anything is launched: without torch, and without reading tensors.

The workers compare hashes in parallel; these checks only ask whether a checkpoint can be what the run needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from llmtrain.checkpoint.contents import TrainerState, read_plan, read_state, why_ended
from llmtrain.checkpoint.folder import find, is_exported, newest, read_latest
from llmtrain.checkpoint.manifest import (
    Manifest,
    already_taken,
    first_names,
    manifest_files,
    missing_parts,
    read_manifests,
    size_problem,
)
from llmtrain.errors import CheckpointError, Problem, RecipeError
from llmtrain.plan import Plan
from llmtrain.recipe import Recipe
from llmtrain.run_dir import RunDir, forbidden_changes
from llmtrain.system.piece_headers import WEIGHT, PieceHeader, read_header
from llmtrain.system.untrusted import UNREADABLE, file_fault


def check_choice(folder: RunDir, resume: str) -> None:
    """Raises UserError for a choice of `--resume` that makes no sense.

    These are: a new run in a folder with checkpoints, a folder that is not a checkpoint, and another run's checkpoint
    for a run that has its own.
    """
    has_own = any(folder.checkpoints.glob("step_*"))
    if resume == "never" and has_own:
        message = f"{folder.path} holds checkpoints, which a new run would overwrite"
        fix = "choose another --run-dir, or continue with --resume auto"
        raise RecipeError(Problem("resume.never", "--resume", message, fix))
    if resume in ("auto", "never"):
        return
    checkpoint = Path(resume)
    if not manifest_files(checkpoint):
        raise CheckpointError(Problem("resume.path", "--resume", f"{checkpoint} is not a checkpoint folder"))
    if has_own and checkpoint.resolve().parent != folder.checkpoints.resolve():
        message = f"{checkpoint} belongs to another run, and {folder.path} has checkpoints of its own"
        raise CheckpointError(Problem("resume.path", "--resume", message, "choose another --run-dir"))


def nothing_left(plan: Plan, folder: RunDir, stop_after: int | None) -> str | None:
    """Returns why there is nothing to do, or None if steps or the export of a finished run are missing."""
    checkpoint = newest(folder.checkpoints)
    if checkpoint is None:
        return None
    manifest = read_manifests(checkpoint)[0]
    ended = why_ended(checkpoint, manifest.ended, plan.recipe)
    if ended or (plan.recipe.train.max_steps and manifest.step >= plan.recipe.train.max_steps):
        is_done = not plan.recipe.export.at_end or is_exported(folder.export, manifest)
        if not is_done:
            return None
        why = f" ({ended}); to go on, change train.early_stopping or callbacks" if ended else ""
        return f"{folder.path} is finished: {manifest.step:,} steps{why}"
    return already_taken(folder.path, manifest.step, stop_after)


def check_resume(plan: Plan, folder: RunDir, resume: str, is_local: bool) -> Path | None:
    """Returns the checkpoint that a run will continue from, as far as is known here; None for a new run.

    resume: `auto`, `never` or a checkpoint. is_local: whether all workers run on this machine, so that files that are
    missing here are missing everywhere. Raises CheckpointError if there are checkpoints and none is usable.
    """
    run = folder.read_id() if folder.id_file.exists() else ""
    if resume == "never":
        return None
    if resume != "auto":
        if problems := _problems(Path(resume), plan, run, is_local, is_named=True):
            raise CheckpointError(problems)
        return Path(resume)
    candidates = [checkpoint.folder for checkpoint in reversed(find(folder.checkpoints))]
    if first := newest(folder.checkpoints):
        candidates = [first, *(candidate for candidate in candidates if candidate != first)]
    _, problems = read_latest(folder.checkpoints)
    for candidate in candidates:
        faults = _problems(candidate, plan, run, is_local, is_named=False)
        if not faults:
            return candidate
        problems += faults
    if problems:
        fix = "restore one of them, or start a new run with another --run-dir"
        none = Problem(
            "checkpoint.none", str(folder.checkpoints), "contains no checkpoint that the run can continue from", fix
        )
        raise CheckpointError([*problems, none])
    return None


def check_data(checkpoint: Path, key: str, recipe: Recipe | None = None) -> TrainerState:
    """Returns the position in a checkpoint. Raises CheckpointError if it was trained on other data than `key`'s.

    recipe: of the run that continues. If it has other sources, its run directory has accepted them (`--allow-change`).
    """
    state = read_state(checkpoint)
    if not state.data:  # imported from another program, whose data are not known here
        state.data = key
    if state.data != key and recipe and read_plan(checkpoint).recipe.data.sources != recipe.data.sources:
        state.data = key
    if state.data != key:
        message = "was trained on other data: the corpus, a function of it, the tokenizer or the packing has changed"
        fix = "restore the data, or start a new run with another --run-dir"
        raise CheckpointError(Problem("checkpoint.data", str(checkpoint), message, fix))
    return state


def _problems(checkpoint: Path, plan: Plan, run: str, is_local: bool, is_named: bool) -> list[Problem]:
    try:
        manifests = read_manifests(checkpoint)
        problems = _other_run_problems(checkpoint, manifests[0], plan, run, is_named)
        files = (item for manifest in manifests for item in manifest.files.items())
        sizes = (size_problem(checkpoint / name, file) for name, file in files)
        problems += [problem for problem in sizes if problem]
        if elsewhere := missing_parts(manifests):
            if not is_local:
                return problems  # the nodes that have the other parts will check them
            message = f"lacks the part of {first_names(elsewhere)}, but all workers run on this machine"
            fix = "copy that part into the same folder, or run on the same nodes"
            problems.append(Problem("checkpoint.part", str(checkpoint), message, fix))
        return problems or _missing_state(checkpoint, plan)
    except CheckpointError as error:
        return list(error.problems)


def _other_run_problems(checkpoint: Path, manifest: Manifest, plan: Plan, run: str, is_named: bool) -> list[Problem]:
    """Compares a checkpoint of another run with the recipe.

    `RunDir.check` has compared the run's own checkpoints.
    """
    if manifest.run == run:
        return []
    if not is_named:
        return [Problem("checkpoint.run", str(checkpoint), f"was written by another run, {manifest.run}")]
    fix = "use the recipe of that run, or export it and start from its weights with model.pretrained"
    differing = forbidden_changes(read_plan(checkpoint).recipe, plan.recipe, f"the run that wrote {checkpoint}")
    return [Problem("checkpoint.recipe", change.field, change.message, fix) for change in differing]


def _missing_state(checkpoint: Path, plan: Plan) -> list[Problem]:
    """Returns which weights and optimizer states the shards of all ranks do not cover."""
    present: dict[tuple[str, str], int] = {}
    whole: dict[tuple[str, str], int] = {}
    for shard in _shard_headers(checkpoint):
        for kind in shard.kinds:
            whole[shard.name, kind] = math.prod(shard.region.shape)
            present[shard.name, kind] = present.get((shard.name, kind), 0) + shard.numel
    problems = [
        Problem("checkpoint.pieces", str(checkpoint), f"does not contain all of {_described(kind)} for '{name}'")
        for (name, kind), numel in present.items()
        if numel < whole[name, kind]
    ]
    kinds = {kind for _, kind in present}
    optim, row = plan.recipe.optim, plan.optimizer_row
    needed = row.factors or (*row.codes, *row.scales) or row.states(optim)
    lacking = [kind for kind in (WEIGHT, *needed) if kind not in kinds]
    if lacking:
        message = f"does not contain {' and '.join(map(_described, lacking))}, which {optim.name} needs to continue"
        problems.append(
            Problem("checkpoint.optimizer", str(checkpoint), message, "export it and start from its weights")
        )
    return problems


def _described(kind: str) -> str:
    return "the weight" if kind == WEIGHT else f"'{kind}' of the optimizer"


def _shard_headers(checkpoint: Path) -> Iterator[PieceHeader]:
    """Yields the description of each shard from the headers of the files."""
    for path in sorted((checkpoint / "engine").glob("rank_*.safetensors")):
        try:
            yield from read_header(path)
        except UNREADABLE as error:
            raise CheckpointError(Problem("checkpoint.head", str(path), file_fault(error))) from None
