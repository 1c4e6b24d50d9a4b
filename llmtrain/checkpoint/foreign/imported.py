"""Writes the state of another program's run as the first checkpoint of a new run."""

from __future__ import annotations

import json
import math
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.checkpoint.base import base_of
from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import PLAN_FILE, STATE_FILE, CheckpointBuilder, point_latest
from llmtrain.checkpoint.foreign.detect import read_foreign
from llmtrain.checkpoint.foreign.names import Names, name_states
from llmtrain.checkpoint.foreign.state import ForeignState
from llmtrain.checkpoint.manifest import File, Manifest
from llmtrain.checkpoint.state import layout_of
from llmtrain.engines.optim import rate_of
from llmtrain.engines.state import files as state_files
from llmtrain.engines.state.save_load import PROGRESS_FILE
from llmtrain.engines.state.shards import CheckpointShard, WeightSlice
from llmtrain.engines.state.writer import DiskWriter
from llmtrain.errors import CheckpointError, Problem, RecipeError, abbreviate, format_value
from llmtrain.models import model_configuration
from llmtrain.models.adapter import select_trained
from llmtrain.models.hub_names import empty_model
from llmtrain.models.loss import freeze_unused
from llmtrain.overrides.transformers import unsaved_names
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.recipe import Recipe
from llmtrain.run_dir import RunDir, identity_of, versions
from llmtrain.run_dir.lock import RunLock
from llmtrain.system.piece_headers import WEIGHT

OPTIMIZERS = ("adamw", "adam", "sgd", "lion")
"""Optimizers whose states have the same names and meanings elsewhere."""
FILE_BYTES = 1 << 30
"""Size of the files that are written, unless one weight is larger."""
CLOSE = 1e-6
"""Relative difference of learning rates that are the same number, computed in another way."""


@dataclass
class Imported:
    """What an import has done."""

    checkpoint: Path
    step: int
    taken: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yields the report for people."""
        for title, lines in (
            ("taken over", self.taken),
            ("different here", self.different),
            ("not imported", self.absent),
        ):
            if lines:
                yield f"{title}:"
                yield from (f"    {line}" for line in lines)


def import_checkpoint(
    folder: Path,
    plan: Plan,
    run_dir: RunDir,
    *,
    step: int | None = None,
    samples: int = 0,
    renames: Sequence[tuple[str, str]] = (),
    say: Callable[[str], None] = print,
) -> Imported:
    """Writes the state in a folder of another program as the first checkpoint of a new run under a plan.

    step: number of optimizer steps that it has taken, by default as the folder tells. samples: number of sequences of
    the recipe's data that it has read, in this program's order. renames: patterns of names in the folder and their
    replacements. say: receives messages about the run directory's lock. Nothing in a pickle is run. Memory holds one
    weight with its states, and what a file of the checkpoint holds. Raises CheckpointError for what cannot be read or
    does not fit the recipe, before anything is written.
    """
    recipe = plan.recipe
    _check_recipe(recipe)
    whole = freeze_unused(empty_model(model_configuration(recipe), torch.float32, recipe.model.trust_remote_code))
    state = read_foreign(folder, whole)
    names = Names(state, whole, renames, str(folder))
    part = select_trained(recipe, whole.config)
    requires = [name for name, weight in whole.named_parameters() if weight.requires_grad]
    trained = [name for name in requires if part is None or name in part.weights]
    _check_tied(state, names, folder)
    name_states(state, names, trained)  # which may replace weights by their fp32 ones
    kinds = plan.optimizer_row.states(recipe.optim)
    _check_states(state, names, trained, kinds, folder)
    taken_steps = _steps(state, names, trained, step, folder)
    other = [name for name in names.groups if name not in trained and name not in unsaved_names(whole)]
    others = [] if recipe.model.omits_base_weights else other
    result = Imported(run_dir.path, taken_steps)
    _describe(result, state, names, recipe, trained, others, kinds, samples, step)
    if _holds_a_run(run_dir):
        message = f"{run_dir.path} holds a run, and an import begins one"
        raise RecipeError(Problem("import.run_dir", "--run-dir", message, "choose another --run-dir"))
    with RunLock.take(run_dir.path, say):
        run_dir.create(plan, render(plan))
        shards = _shards(state, names, trained, others, kinds)
        result.checkpoint = _write(plan, run_dir, taken_steps, samples, shards)
    return result


def _holds_a_run(run_dir: RunDir) -> bool:
    return any(run_dir.checkpoints.glob("step_*")) or (
        run_dir.metrics_file.exists() and run_dir.metrics_file.stat().st_size > 0
    )


def _check_recipe(recipe: Recipe) -> None:
    """Raises RecipeError for recipes whose state no other program has in a form that is read here."""
    problems = []
    if recipe.optim.name not in OPTIMIZERS:
        message = f"'{recipe.optim.name}' keeps states of its own form; those of {', '.join(OPTIMIZERS)} are imported"
        fix = "start from the weights with model.pretrained"
        problems.append(Problem("import.optimizer", "optim.name", message, fix))
    if recipe.model.adapter is not None:
        message = "the training of an adapter is not imported"
        fix = "continue from its weights with model.adapter.pretrained"
        problems.append(Problem("import.adapter", "model.adapter", message, fix))
    if problems:
        raise RecipeError(problems)


def _check_states(
    state: ForeignState, names: Names, trained: Sequence[str], kinds: Sequence[str], folder: Path
) -> None:
    problems = []
    for kind in kinds:
        lacking = [
            name for name in trained if any(kind not in state.states.get(file, {}) for file in names.files_of(name))
        ]
        if lacking:
            found = sorted({kind for states in state.states.values() for kind in states})
            has = f"it has {', '.join(found)}" if found else "it has no optimizer states"
            message = (
                f"lacks '{kind}' of the optimizer for {len(lacking)} of {len(trained)} weights: {abbreviate(lacking)}"
            )
            fix = "set optim.name to the optimizer of that run, or start from its weights with model.pretrained"
            problems.append(Problem("import.states", str(folder), f"{message}; {has}", fix))
    wrong = [
        f"'{kind}' of {file} {list(tensor.shape)}"
        for name in trained
        for file in names.files_of(name)
        for kind, tensor in state.states.get(file, {}).items()
        if kind in kinds and math.prod(tensor.shape) != math.prod(state.weights[file].shape)
    ]
    if wrong:
        message = f"has {len(wrong)} optimizer states of another size than their weights: {abbreviate(wrong)}"
        problems.append(Problem("import.states", str(folder), message))
    if problems:
        raise CheckpointError(problems)


def _check_tied(state: ForeignState, names: Names, folder: Path) -> None:
    """Raises CheckpointError if the folder has different values for a weight that the model has once."""
    for name, stored in names.stored_twice():
        values = [names.importer.tensor(one, lambda key: state.weights[names.origin[key]].read()) for one in stored]
        if any(not torch.equal(values[0].float(), value.float()) for value in values[1:]):
            message = f"has different values for {' and '.join(stored)}, which the recipe's model ties"
            fix = "--set model.config.tie_word_embeddings=false, if they were trained separately"
            raise CheckpointError(Problem("import.tied", f"{folder}: {name}", message, fix))


def _steps(state: ForeignState, names: Names, trained: Sequence[str], step: int | None, folder: Path) -> int:
    """Returns the number of optimizer steps taken: as named, as the folder says, or as its optimizer has counted."""
    counted = int(max((state.updates.get(file, 0.0) for name in trained for file in names.files_of(name)), default=0))
    steps = next((one for one in (step, state.step, counted) if one), 0)
    if not steps:
        message = "does not tell how many steps it has taken"
        raise CheckpointError(Problem("import.step", str(folder), message, "name it: --step N"))
    return steps


def _describe(
    result: Imported,
    state: ForeignState,
    names: Names,
    recipe: Recipe,
    trained: Sequence[str],
    others: Sequence[str],
    kinds: Sequence[str],
    samples: int,
    step: int | None,
) -> None:
    """Adds what is taken over, what differs here, and what is absent."""
    files = [file for name in trained for file in names.files_of(name)]
    low = sorted({str(state.weights[file].dtype).removeprefix("torch.") for file in files} - {"float32"})
    weights = sum(math.prod(names.shapes[name]) for name in [*trained, *others])
    result.taken.append(f"{len(trained) + len(others)} weights, {weights:,} numbers, from {state.program}")
    if low:
        result.different.append(f"weights: the folder has them in {', '.join(low)}; here they are trained in float32")
    result.taken.append(f"{' and '.join(kinds) or 'no state'} of the optimizer for {len(trained)} weights")
    counted = sorted({int(state.updates.get(file, 0)) for file in files})
    counts = f", of which the optimizer counts {_range(counted)} updates" if counted != [0] else ""
    result.taken.append(f"step {result.step:,}{counts}")
    steps = recipe.train.max_steps
    if steps is not None and result.step >= steps:
        result.different.append(f"train.max_steps: the recipe ends at step {steps:,}, so nothing is left to train")
    result.different += state.differences
    result.different += list(_other_options(state, names, recipe, trained, result.step))
    if samples:
        result.taken.append(f"position in the data: {samples:,} sequences of this recipe, as --samples says")
    else:
        result.absent.append("position in the data: training begins with this recipe's first sequence (--samples N)")
    result.absent.append("random states: not read; they are seeded by the recipe")
    if recipe.parallel.precision == "fp16":
        result.absent.append("loss scale: it begins as that of a new run")
    if recipe.model.omits_base_weights:
        result.absent.append("frozen weights: they are those of model.pretrained")
    result.absent += [f"{what}: not read" for what in state.unread]


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def _other_options(
    state: ForeignState, names: Names, recipe: Recipe, trained: Sequence[str], step: int
) -> Iterator[str]:
    """Yields how the folder's optimizer differs from the recipe's."""
    optim = recipe.optim
    shapes = {file: names.shapes[name] for name in trained for file in names.files_of(name)}
    named = any(group.names for group in state.groups)
    groups = [group for group in state.groups if not named or any(name in shapes for name in group.names)]
    expected: dict[str, Any] = {"betas": tuple(optim.betas), "eps": optim.eps}
    if optim.name == "sgd":
        expected = {"momentum": optim.betas[0], "dampening": 0, "nesterov": False}
    for option, ours in expected.items():
        found = [group.options[option] for group in groups if option in group.options]
        values = {tuple(value) if isinstance(value, list | tuple) else value for value in found}
        for value in sorted(values, key=str):
            if not _is_close(value, ours):
                yield f"{option}: {_shown(value)} in the folder, {_shown(ours)} here"
    decays: dict[tuple[float, float], list[str]] = {}
    for group in groups:
        if isinstance(decay := group.options.get("weight_decay"), int | float):
            for name in (name for name in group.names if name in shapes):
                here = optim.weight_decay if len(shapes[name]) >= 2 else 0.0
                if abs(decay - here) > CLOSE * max(abs(decay), abs(here)):
                    decays.setdefault((decay, here), []).append(name)
    for (decay, here), weights in decays.items():
        yield (
            f"optim.weight_decay: {_shown(decay)} in the folder, {_shown(here)} here, for {len(weights)} weights: "
            f"{abbreviate(weights, 2)}"
        )
    decoupled = {
        group.options["decoupled_weight_decay"] for group in groups if "decoupled_weight_decay" in group.options
    }
    if optim.name in ("adam", "adamw") and decoupled in ({True}, {False}) and decoupled != {optim.name == "adamw"}:
        foreign = "AdamW (decoupled)" if decoupled == {True} else "Adam with L2"
        yield f"optim.name: the folder's weight decay is that of {foreign}, the recipe's optimizer is {optim.name}"
    if any(group.options.get("amsgrad") for group in groups):
        yield "amsgrad: the folder's optimizer uses it; here the largest second moments are left out"
    if recipe.train.max_steps is not None:
        ours_next = rate_of(recipe, step + 1)
        rates = {float(group.options["lr"]) for group in groups if isinstance(group.options.get("lr"), int | float)}
        for rate in sorted(rates):
            if abs(rate - ours_next) > CLOSE * max(abs(rate), abs(ours_next)):
                yield (
                    f"learning rate: the folder's next step has {_shown(rate)}, and step {step + 1:,} of the recipe's "
                    f"schedule has {_shown(ours_next)}"
                )


def _is_close(value: Any, ours: Any) -> bool:
    """Whether two options, numbers or tuples of numbers, are the same but for rounding."""
    theirs, here = (one if isinstance(one, tuple) else (one,) for one in (value, ours))
    are_numbers = all(isinstance(one, int | float) for one in theirs)
    return (
        are_numbers
        and len(theirs) == len(here)
        and all(abs(a - b) <= CLOSE * abs(b) for a, b in zip(theirs, here, strict=True))
    )


def _shown(value: Any) -> str:
    return format_value(value)


def _shards(
    state: ForeignState, names: Names, trained: Sequence[str], others: Sequence[str], kinds: Sequence[str]
) -> Iterator[list[CheckpointShard]]:
    """Yields the weights with their states, in the lists that make a file each."""
    batch: list[CheckpointShard] = []
    size = 0
    for name in (*trained, *others):
        whole = WeightSlice.whole(names.shapes[name])
        weight = names.tensor(name, lambda file: state.weights[file].read())
        tensors = {WEIGHT: weight.float() if weight.is_floating_point() else weight}
        steps = None
        if name in trained:
            for kind in kinds:
                tensors[kind] = names.tensor(name, partial(_state_of, state, kind)).float()
            counted = max(state.updates.get(file, 0.0) for file in names.files_of(name))
            steps = torch.tensor(counted) if kinds != ("momentum_buffer",) else None
        flat = {kind: tensor.reshape(-1).contiguous() for kind, tensor in tensors.items()}
        batch.append(CheckpointShard(name, whole, 0, flat, steps))
        size += sum(tensor.numel() * tensor.element_size() for tensor in flat.values())
        if size >= FILE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _state_of(state: ForeignState, kind: str, file: str) -> Tensor:
    return state.states[file][kind].read().view(state.weights[file].shape)


def _write(plan: Plan, run_dir: RunDir, step: int, samples: int, shards: Iterator[list[CheckpointShard]]) -> Path:
    """Writes the checkpoint, complete or not at all, and makes `latest` name it."""
    builder = CheckpointBuilder(run_dir.checkpoints, step, run_dir.read_id())
    try:
        builder.start()
        writer = DiskWriter(builder.folder)
        state_files.write(writer, 0, shards)
        writer.text(PROGRESS_FILE, json.dumps({"schedule": step}, indent=1))
        writer.text(STATE_FILE, TrainerState(step=step, samples=samples, base=base_of(plan)).text())
        writer.text(PLAN_FILE, plan.model_dump_json(indent=1))
        if writer.error is not None:
            raise writer.error
        files = {name: File(**vars(file.fingerprint), rank=0, private=False) for name, file in writer.files.items()}
        builder.finish(
            Manifest(
                save=uuid.uuid4().hex,
                part=0,
                hosts=[socket.gethostname()],
                run=run_dir.read_id(),
                recipe=identity_of(plan.recipe),
                step=step,
                samples=samples,
                eval_loss=None,
                written=datetime.now(UTC).isoformat(timespec="microseconds"),
                world_size=plan.workers,
                layout=layout_of(plan),
                versions=versions(),
                files=files,
            )
        )
        builder.publish()
        point_latest(run_dir.checkpoints, builder.final.name)
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        problem = Problem("import.write", str(builder.final), message, "free some space, or choose another --run-dir")
        raise CheckpointError(problem) from None
    finally:
        builder.abandon()
    return builder.final
