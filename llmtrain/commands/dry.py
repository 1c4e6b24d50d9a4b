"""`llmtrain train --dry-run`: the plan made small and run here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llmtrain.commands.options import named_cluster
from llmtrain.errors import Problem, RecipeError, UserError


def check_dry_run(dry_run: bool, is_worker: bool, nproc: int | None, *cluster: int | str | bool | None) -> None:
    """Raises RecipeError for options of a dry run without one, and for those that exclude each other."""
    nodes, per_node, device, as_json = cluster
    given = {"--nodes": nodes, "--gpus-per-node": per_node, "--device": device, "--json": as_json}
    named = [name for name, value in given.items() if value]
    problems = []
    if named and not dry_run:
        message = "is given without --dry-run: a run takes its devices from this machine, or from its launcher"
        fix = "add --dry-run or --launcher slurm, or leave it out"
        problems += [Problem("train.dry_run", name, message, fix) for name in named]
    if dry_run and is_worker:
        message = "starts its own ranks, and a launcher has started this process"
        problems.append(Problem("train.dry_run", "--dry-run", message, "llmtrain train RECIPE --dry-run"))
    if dry_run and nproc and (nodes or per_node or device):
        message = "says workers of this machine, and --nodes, --gpus-per-node and --device another cluster"
        problems.append(Problem("train.dry_run", "--nproc", message, "leave one of them out"))
    if problems:
        raise RecipeError(problems)


def run_small(
    recipe: str,
    assignments: list[str],
    nproc: int | None,
    cluster: tuple[int | None, int | None, str | None],
    run_dir: Path | None,
    as_json: bool,
) -> None:
    """Runs the plan made small, and prints the report, which lies beside where the run itself would."""
    from rich.console import Console

    from llmtrain.cluster import local_cluster
    from llmtrain.dry_run.run import REPORT, dry_run
    from llmtrain.plan.load import load_recipe
    from llmtrain.precheck import check_stages, runnable_plan
    from llmtrain.run_dir import RunDir, default_run_dir

    try:
        declared, written_for = load_recipe(recipe, assignments)
        beside = run_dir or default_run_dir(declared, recipe.partition(":")[2] or None).path
        beside = beside if beside.name else beside.resolve()
        folder = RunDir(beside.parent / f"{beside.name}-dry-run")
        plan = runnable_plan(declared, local_cluster(nproc) if nproc else named_cluster(written_for, *cluster))
        check_stages(plan)
        report = dry_run(plan, folder)
    except UserError as error:
        if as_json:
            print(json.dumps({"passed": False} | error.as_dict(), indent=2))
            sys.exit(error.exit_code)
        raise
    if as_json:
        print(json.dumps(report.document(), indent=2))
        print(f"report {folder.path / REPORT}", file=sys.stderr)
        return
    console = Console()
    for line in report.lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(report.table())
    console.print(f"report {folder.path / REPORT}", highlight=False, markup=False, soft_wrap=True)
