"""`llmtrain checkpoint`: lists, verifies, converts and imports checkpoints.

As in `cli`, a command imports what it needs only when it runs. Only conversion and import load torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.commands.options import MAX_OPTION, JsonOption, RecipeArgument, SetOption, TrustOption, named_cluster
from llmtrain.errors import CheckpointError, Exit, Problem, RecipeError
from llmtrain.system.host import MAX_WORKERS
from llmtrain.system.stops import interrupt_on_sigterm
from llmtrain.system.streams import quiet_libraries
from llmtrain.system.untrusted import UNREADABLE, file_fault

if TYPE_CHECKING:
    from llmtrain.checkpoint.folder import FoundCheckpoint
    from llmtrain.recipe.cluster import Cluster

app = typer.Typer(help="List, verify, convert and import checkpoints.", no_args_is_help=True)

PathArgument = Annotated[
    Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run directory, its checkpoints/, or one checkpoint.")
]


@app.command("list")
def list_checkpoints(path: PathArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of a run, in the order written.

    Reads only the manifests; `llmtrain checkpoint verify` reads the files.
    """
    from llmtrain.checkpoint.folder import find, newest

    checkpoints = checkpoints_of(path)
    _warn_of_latest(checkpoints)
    latest = newest(checkpoints)
    rows = [_row(checkpoint, is_latest=checkpoint.folder == latest) for checkpoint in find(checkpoints)]
    if as_json:
        print(json.dumps({"checkpoints": rows}, indent=2))
    else:
        _print_table(rows)


@app.command("verify")
def verify_checkpoints(path: PathArgument, as_json: JsonOption = False) -> None:
    """Check whether checkpoints are complete.

    Compares the size and hash of every file with the manifest. Reports pickles, and does not load them. For a run, all
    of its checkpoints are checked. Exits with 4 if one is damaged.
    """
    from llmtrain.checkpoint.folder import find

    if is_one(path):
        folders = [path]
    else:
        folders = [checkpoint.folder for checkpoint in find(checkpoints_of(path))]
        _warn_of_latest(checkpoints_of(path))
    if not folders:
        raise CheckpointError(Problem("checkpoint.none", str(path), "has no checkpoint"))
    problems = {folder: _problems(folder) for folder in folders}
    if as_json:
        checked = [
            {"folder": str(folder), "complete": not found, "problems": [problem.as_dict() for problem in found]}
            for folder, found in problems.items()
        ]
        print(json.dumps({"checkpoints": checked}, indent=2))
    else:
        for folder, found in problems.items():
            print(f"{folder} is {'damaged' if found else 'complete'}")
            for problem in found:
                print(f"    {problem}")
    sys.exit(Exit.CHECKPOINT if any(problems.values()) else Exit.DONE)


@app.command("convert")
def convert_checkpoint(
    path: PathArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    assignments: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set a field of the new plan. Repeatable.")
    ] = [],  # noqa: B006  (typer copies it)
    nproc: Annotated[
        int | None, typer.Option(help="Number of workers of the new plan, on one machine.", min=1, max=MAX_WORKERS)
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Number of machines of the new plan; default: as in the checkpoint.", min=1)
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="Number of devices per machine.", min=1)] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Rewrite a checkpoint for another plan. This needs no GPU.

    Any plan can continue from any checkpoint without a conversion. After one, each rank reads only its own files. This
    helps if each rank has its own disk, or if disks are slow.
    """
    if nproc and (nodes or gpus_per_node):
        message = "is for one machine, and cannot be combined with --nodes and --gpus-per-node"
        raise RecipeError(Problem("convert.cluster", "--nproc", message, "leave one of them out"))
    # These are set before torch and DeepSpeed are loaded, so that no GPU is required or initialised.
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    checkpoint = one_checkpoint(path)
    interrupt_on_sigterm()
    from llmtrain.recipe import parse_assignments

    def resized(cluster: Cluster) -> Cluster:
        return named_cluster(cluster, *((1, nproc) if nproc else (nodes, gpus_per_node)), None)

    with quiet_libraries():
        from llmtrain.checkpoint.convert import convert, target_plan

        plan = target_plan(checkpoint, parse_assignments(assignments), resized, trust_remote_code)
        convert(checkpoint, out, plan)
    print(f"converted {checkpoint} to {out}; continue with --resume {out}")


@app.command("import")
def import_foreign(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder of DeepSpeed, the Trainer, FSDP, Megatron or others."),
    ],
    recipe: RecipeArgument,
    assignments: SetOption = [],  # noqa: B006  (typer copies it)
    run_dir: Annotated[Path | None, typer.Option(help="New run directory; default: runs/NAME[-VARIANT].")] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Number of workers for which the recipe is planned here.", min=1, max=MAX_WORKERS)
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Number of optimizer steps taken; default: as the folder tells.", min=1)
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Number of sequences already read, in this recipe's order.", min=0, max=MAX_OPTION)
    ] = 0,
    rename: Annotated[
        list[str],
        typer.Option(
            metavar="PATTERN=REPLACEMENT",
            help="Replace a regular expression in the folder's names of weights. Repeatable; applied in this order.",
        ),
    ] = [],  # noqa: B006
    trust_remote_code: TrustOption = False,
) -> None:
    """Begin a run with another program's training state.

    Takes weights, optimizer states and step from DeepSpeed's folders (ZeRO 0 to 3, pipelines, universal checkpoints),
    checkpoint-N of the Trainer, save_state of Accelerate, torch.distributed.checkpoint, and Megatron-Core's torch_dist.
    Runs nothing that a pickle names. `llmtrain train RECIPE` continues.
    """
    interrupt_on_sigterm()
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.rules import resolve
    from llmtrain.run_dir import RunDir, default_run_dir
    from llmtrain.system.stops import say

    renames = []
    for text in rename:
        pattern, equals, replacement = text.partition("=")
        if not equals or not pattern:
            problem = Problem(
                "import.rename", "--rename", f"'{text}' is not PATTERN=REPLACEMENT", "--rename '^net\\.=model.'"
            )
            raise RecipeError(problem)
        renames.append((pattern, replacement))
    declared, written_for = load_recipe(recipe, assignments)
    if trust_remote_code:
        declared = declared.with_(**{"model.trust_remote_code": True})
    _, _, variant = recipe.partition(":")
    cluster = named_cluster(None, 1, nproc, "cpu") if nproc else named_cluster(written_for, None, None, None)
    # As for a conversion: no GPU is initialised.
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    with quiet_libraries():
        from llmtrain.checkpoint.foreign.imported import import_checkpoint

        target = RunDir(run_dir) if run_dir else default_run_dir(declared, variant or None)
        plan = resolve(declared, cluster)
        done = import_checkpoint(folder, plan, target, step=step, samples=samples, renames=renames, say=say)
    print(*done.lines(), sep="\n")
    print(f"imported {folder} as {done.checkpoint}; llmtrain train continues it")


def is_one(path: Path) -> bool:
    """Whether a path is a checkpoint rather than a run."""
    from llmtrain.checkpoint.folder import is_checkpoint_name
    from llmtrain.checkpoint.manifest import manifest_files

    return is_checkpoint_name(Path(os.path.realpath(path)).name) or bool(manifest_files(path))


def checkpoints_of(path: Path) -> Path:
    """Returns the folder of checkpoints to which the user's path refers. Raises CheckpointError if there is none."""
    try:
        names = [entry.name for entry in path.iterdir()]
    except UNREADABLE as error:
        raise CheckpointError(Problem("checkpoint.run", str(path), f"cannot be read: {file_fault(error)}")) from None
    if "checkpoints" in names:
        return path / "checkpoints"
    if path.name == "checkpoints" or any(name.startswith("step_") for name in names):
        return path
    raise CheckpointError(Problem("checkpoint.run", str(path), "is not a run directory (it has no checkpoints/)"))


def one_checkpoint(path: Path) -> Path:
    """Returns the checkpoint at a path, or the newest one of a run. Warns about unreadable ones.

    Raises CheckpointError if there is none.
    """
    from llmtrain.checkpoint.folder import faults, newest

    if is_one(path):
        return Path(os.path.realpath(path))
    checkpoints = checkpoints_of(path)
    found, problems = newest(checkpoints), faults(checkpoints)
    if found is None:
        raise CheckpointError([*problems, Problem("checkpoint.none", str(path), "has no complete checkpoint")])
    _warn(problems)
    if problems:
        print(f"using {found}", file=sys.stderr)
    return Path(os.path.realpath(found))


def best_checkpoint(path: Path) -> Path:
    """Returns the best checkpoint of a run by the metric that the newest one's recipe names.

    Raises CheckpointError if no checkpoint was evaluated after the same step.
    """
    from llmtrain.checkpoint.contents import read_plan
    from llmtrain.checkpoint.folder import best_first, find

    if is_one(path):
        raise CheckpointError(Problem("checkpoint.best", str(path), "is one checkpoint; --best chooses among a run's"))
    config = read_plan(one_checkpoint(path)).recipe.checkpoint
    best = best_first(find(checkpoints_of(path)), config)
    if not best:
        message = f"has no checkpoint with an evaluation after the same step that has {config.best_metric}"
        raise CheckpointError(Problem("checkpoint.best", str(path), message, "leave out --best for the newest one"))
    return Path(os.path.realpath(best[0].folder))


def _warn_of_latest(checkpoints: Path) -> None:
    from llmtrain.checkpoint.folder import read_latest

    _warn(read_latest(checkpoints)[1])


def _warn(problems: Iterable[Problem]) -> None:
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)


def _problems(folder: Path) -> list[Problem]:
    from llmtrain.checkpoint.check import verify_checkpoint

    try:
        verify_checkpoint(folder)
    except CheckpointError as error:
        return list(error.problems)
    return []


def _row(found: FoundCheckpoint, is_latest: bool) -> dict[str, Any]:
    from llmtrain.checkpoint.manifest import missing_parts, read_manifests

    row: dict[str, Any] = {"folder": str(found.folder), "latest": is_latest}
    try:
        parts = read_manifests(found.folder)
    except CheckpointError as error:
        return {**row, "problem": str(error)}
    first = parts[0]
    return {
        **row,
        "step": first.step,
        "samples": first.samples,
        "eval_loss": first.eval_loss,
        "bytes": sum(part.bytes for part in parts),
        "written": first.written,
        "world_size": first.world_size,
        "layout": first.layout,
        "run": first.run,
        "missing_parts": missing_parts(parts),
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("checkpoint", "step", "samples", "eval loss", "MiB", "written (UTC)", "ranks", ""):
        table.add_column(name, justify="left" if name in ("checkpoint", "written (UTC)", "") else "right")
    for row in rows:
        name, latest = Path(row["folder"]).name, "latest" if row["latest"] else ""
        if "problem" in row:
            table.add_row(name, *[""] * 6, "no readable manifest")
            continue
        loss = "" if row["eval_loss"] is None else f"{row['eval_loss']:.4f}"
        note = "; ".join([latest] * bool(latest) + [f"without the part of {host}" for host in row["missing_parts"]])
        table.add_row(
            *(name, f"{row['step']:,}", f"{row['samples']:,}", loss, f"{row['bytes'] / 2**20:,.1f}"),
            *(row["written"][:19].replace("T", " "), str(row["world_size"]), note),
        )
    Console().print(table)
