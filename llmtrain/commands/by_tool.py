"""`llmtrain train --launcher torchrun|accelerate`: prints the command lines of a dry run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.commands.request import TrainRequest

if TYPE_CHECKING:
    from llmtrain.launch.tools import Tool


def print_lines(tool: Tool, request: TrainRequest) -> None:
    """Checks the plan, then prints it on standard error and the command line of each node on standard output."""
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
