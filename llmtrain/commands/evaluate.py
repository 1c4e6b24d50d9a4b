"""`llmtrain eval`: scores a run on downstream tasks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.options import MAX_OPTION, JsonOption
from llmtrain.errors import CheckpointError, Problem, RecipeError, format_value
from llmtrain.system.stops import interrupt_on_sigterm
from llmtrain.system.streams import print_as_is, quiet_libraries
from llmtrain.system.untrusted import UNREADABLE, read_json

if TYPE_CHECKING:
    from llmtrain.recipe import TasksConfig
    from llmtrain.run_dir import RunDir
    from llmtrain.train.tasks import Results, Scored


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """All options of the command line."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
    tasks: Annotated[str | None, typer.Option(help="Names of tasks, separated by commas; default: the recipe's.")] = (
        None
    )
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint; default: the last one.", min=0, max=MAX_OPTION)
    ] = None
    include_path: Annotated[
        Path | None,
        typer.Option(
            help="Folder with your own tasks as YAML files, whose code is run; default: the recipe's, with "
            "--trust-remote-code."
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run the Python code that comes with the model, and that of the recipe's tasks.include_path. Inspect "
            "it first.",
        ),
    ] = False
    limit: Annotated[
        int | None, typer.Option(help="Largest number of documents per task; default: the recipe's.", min=1)
    ] = None
    batch_size: Annotated[int, typer.Option(help="Number of texts in a forward pass.", min=1)] = 8
    as_json: JsonOption = False


def evaluate_tasks(request: EvalRequest) -> None:
    """Score a checkpoint of a run on downstream tasks.

    The tasks are those of lm-evaluation-harness. The scores are written to eval/step_N.json in the run directory.
    """
    from llmtrain.checkpoint.folder import scratch_folder, step_of
    from llmtrain.run_dir import RunDir
    from llmtrain.train.tasks import check_harness, score_table

    interrupt_on_sigterm()
    run = RunDir(request.run)
    recipe = run.read_recipe()
    declared = recipe.tasks
    names = tuple(filter(None, request.tasks.split(","))) if request.tasks else declared.names
    if not names:
        raise RecipeError(
            Problem("tasks.none", "--tasks", "is required: the recipe names no tasks", "--tasks hellaswag")
        )
    include = request.include_path or _own_tasks(run, declared, request.trust_remote_code)
    check_harness()
    checkpoint = _checkpoint(run, request.step)
    with quiet_libraries():
        from llmtrain.train.lm_eval_harness import results_of, tasks_of

        manager = tasks_of(names, include)
        with scratch_folder(run.path, "eval") as scratch:
            model = _exported(run, checkpoint, scratch / "model", request.trust_remote_code)
            trusts = request.trust_remote_code and recipe.model.runs_own_code
            limit = request.limit or declared.limit
            results = results_of(model, names, manager, include, limit, request.batch_size, trusts)
    step = step_of(checkpoint.name)
    scored = _write(run.eval_file(step), results, limit)
    if request.as_json:
        print(scored.model_dump_json(indent=2))
        return
    from rich.console import Console

    console = Console()
    console.print(score_table(results, step))
    print_as_is(console, [f"written to {run.eval_file(step)}"])


def _checkpoint(run: RunDir, step: int | None) -> Path:
    from llmtrain.checkpoint.folder import newest, step_folder

    folder = newest(run.checkpoints) if step is None else step_folder(run.checkpoints, step)
    if folder is None or not folder.is_dir():
        which = "checkpoint" if step is None else f"checkpoint of step {step:,}"
        raise CheckpointError(Problem("checkpoint.none", str(run.path), f"has no {which}"))
    return folder


def _own_tasks(run: RunDir, declared: TasksConfig, trust_remote_code: bool) -> Path | None:
    """Returns the run's own folder of tasks, if any. Raises RecipeError if its code may not be run."""
    if declared.include_path is None or trust_remote_code:
        return Path(declared.include_path) if declared.include_path else None
    field, value = f"{run.recipe_file}: tasks.include_path", format_value(declared.include_path)
    message = f"is {value}, and tasks may contain code (!function), which a run directory cannot permit to run"
    fix = f"inspect the tasks, and name them with --include-path {quote(declared.include_path)}, or permit the run's "
    raise RecipeError(Problem("tasks.remote_code", field, message, f"{fix}with --trust-remote-code"))


def _exported(run: RunDir, checkpoint: Path, scratch: Path, trust_remote_code: bool) -> Path:
    """Returns a Hugging Face folder of a checkpoint: the run's export if it is of this checkpoint, else a new one."""
    from llmtrain.checkpoint.export import export
    from llmtrain.checkpoint.folder import is_exported
    from llmtrain.checkpoint.manifest import read_manifests

    if is_exported(run.export, read_manifests(checkpoint)[0]):
        return run.export
    export(checkpoint, run.tokenizer, scratch, trust_remote_code=trust_remote_code)
    return scratch


def _write(file: Path, results: Results, limit: int | None) -> Scored:
    """Adds results to the file, which keeps those of other tasks for the same checkpoint; returns its content."""
    from llmtrain.run_dir import write_json
    from llmtrain.train.tasks import Scored

    try:
        before = read_json(file, Scored)
    except UNREADABLE:
        before = Scored()
    origin = {"harness": version("lm_eval"), "limit": limit, "written": datetime.now(UTC).isoformat(timespec="seconds")}
    scored = Scored(
        results={**before.results, **results}, computed={**before.computed, **dict.fromkeys(results, origin)}
    )
    file.parent.mkdir(exist_ok=True)
    write_json(file, scored.model_dump(mode="json"))
    return scored
