"""`llmtrain train --launcher torchrun|accelerate`: what is no option of theirs, and the lines of a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.commands.options import named_cluster, script_of
from llmtrain.errors import Problem, RecipeError

if TYPE_CHECKING:
    from llmtrain.launch import Rank
    from llmtrain.launch.tools import Tool


def check_by_tool(
    tool: Tool, rank: Rank | None, dry_run: bool, others: Mapping[str, object], cluster: Mapping[str, object]
) -> None:
    """Raises RecipeError for what these launchers do not do.

    others: option → what was given, of those that never apply; cluster: of those that a dry run takes.
    """
    rule, name = "launch.options", f"--launcher {tool}"
    problems = [
        Problem(rule, option, f"was given, but is no option of {name}", "leave it out, or use --launcher local")
        for option, value in others.items()
        if value
    ]
    if not dry_run:
        message = f"is given without --dry-run: {name} starts the workers of this machine"
        fix = "add --dry-run, which prints the line that each node runs"
        problems += [Problem(rule, option, message, fix) for option, value in cluster.items() if value]
    if rank is not None:
        message = f"starts workers, and {rank.launcher} has started this process as one"
        problems.append(Problem(rule, name, message, "leave it out"))
    if problems:
        raise RecipeError(problems)


def print_lines(
    tool: Tool,
    recipe: str,
    assignments: list[str],
    nproc: int | None,
    cluster: tuple[int | None, int | None, str | None],
    run_dir: Path | None,
    resume: str,
    max_steps: int | None,
) -> None:
    """Checks the plan, and prints how the tool starts it: the plan on standard error, the lines on standard output."""
    from rich.console import Console

    from llmtrain.cluster import local_cluster
    from llmtrain.commands.shown import print_plan
    from llmtrain.commands.start import startable
    from llmtrain.launch.tools import check_tool, lines_of
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.memory import memory_of
    from llmtrain.run_dir import RunDir, default_run_dir

    declared, written_for = load_recipe(recipe, assignments)
    machine = local_cluster(nproc) if nproc else named_cluster(written_for, *cluster)
    path, colon, variant = recipe.partition(":")
    folder = (RunDir(run_dir) if run_dir else default_run_dir(declared, variant or None)).path.absolute()
    plan = startable(declared, machine, RunDir(folder), resume, machine.world_size)
    check_tool(tool, plan)
    print_plan(plan, Console(stderr=True), memory_of(plan))
    script = (*script_of(recipe, assignments, resume, max_steps), "--run-dir", str(folder))
    sets = (part for assignment in assignments for part in ("--set", assignment))
    named = ("--nodes", str(machine.nodes), "--gpus-per-node", str(machine.devices_per_node))
    planned = ("plan", f"{Path(path).absolute()}{colon}{variant}", *sets, *named, "--device", machine.device)
    beside = folder.with_name(f"{folder.name}-plan")
    print("\n".join(lines_of(tool, plan, script, beside, planned)))
