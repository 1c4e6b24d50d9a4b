"""`llmtrain train --launcher torchrun|accelerate`: what is no option of theirs, and the lines of a dry run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.commands.request import TrainRequest
from llmtrain.errors import Problem, RecipeError

if TYPE_CHECKING:
    from llmtrain.launch import Rank
    from llmtrain.launch.tools import Tool


def check_by_tool(tool: Tool, rank: Rank | None, request: TrainRequest) -> None:
    """Raises RecipeError for what these launchers do not do. rank: what this process was started as."""
    others = {"--json": request.as_json, "--max-restarts": request.max_restarts}
    rule, name = "launch.options", f"--launcher {tool}"
    problems = [
        Problem(rule, option, f"was given, but is no option of {name}", "leave it out, or use --launcher local")
        for option, value in others.items()
        if value
    ]
    if not request.dry_run:
        message = f"is given without --dry-run: {name} starts the workers of this machine"
        fix = "add --dry-run, which prints the line that each node runs"
        problems += [Problem(rule, option, message, fix) for option, value in request.of_cluster.items() if value]
    if rank is not None:
        message = f"starts workers, and {rank.launcher} has started this process as one"
        problems.append(Problem(rule, name, message, "leave it out"))
    if problems:
        raise RecipeError(problems)


def print_lines(tool: Tool, request: TrainRequest) -> None:
    """Checks the plan, and prints how the tool starts it: the plan on standard error, the lines on standard output."""
    from rich.console import Console

    from llmtrain.cluster import local_cluster
    from llmtrain.commands.shown import print_plan
    from llmtrain.commands.start import startable
    from llmtrain.launch.tools import check_tool, lines_of
    from llmtrain.plan.memory import memory_of
    from llmtrain.run_dir import RunDir

    declared, written_for = request.load()
    machine = local_cluster(request.nproc) if request.nproc else request.cluster(written_for)
    folder = request.folder(declared).path.absolute()
    plan = startable(declared, machine, RunDir(folder), request.resume, machine.world_size)
    check_tool(tool, plan)
    print_plan(plan, Console(stderr=True), memory_of(plan))
    script = (*request.script, "--run-dir", str(folder))
    named = ("--nodes", str(machine.nodes), "--gpus-per-node", str(machine.devices_per_node))
    planned = ("plan", request.absolute, *request.sets, *named, "--device", machine.device)
    beside = folder.with_name(f"{folder.name}-plan")
    print("\n".join(lines_of(tool, plan, script, beside, planned)))
