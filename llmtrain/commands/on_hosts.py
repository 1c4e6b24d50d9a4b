"""`llmtrain train --launcher deepspeed`: workers on the hosts of a hostfile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmtrain.commands.options import script_of
from llmtrain.commands.shown import print_plan
from llmtrain.commands.start import startable
from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.runners import RunnerName


@dataclass(frozen=True)
class HostsRequest:
    """What the command line says of a job on hosts."""

    recipe: str
    assignments: list[str]
    hostfile: Path | None
    include: str
    exclude: str
    runner: RunnerName
    run_dir: Path | None
    resume: str
    max_steps: int | None

    @property
    def argv(self) -> tuple[str, ...]:
        """The recipe's script as each worker runs it, but for the run directory."""
        return script_of(self.recipe, self.assignments, self.resume, self.max_steps)


def check_hosts(others: Mapping[str, object]) -> None:
    """Raises RecipeError for options that are not of a job on hosts. others: option → what was given."""
    problems = [
        Problem("launch.options", name, "was given, but is no option of --launcher deepspeed", "leave it out")
        for name, value in others.items()
        if value
    ]
    if problems:
        raise RecipeError(problems)


def train_on_hosts(request: HostsRequest) -> None:
    """Checks all that can be known before a worker starts, then trains; leaves the process with the exit code."""
    from rich.console import Console

    from llmtrain.cluster import Cluster, local_cluster
    from llmtrain.launch.hostfile import read_hosts
    from llmtrain.launch.hosts import HostsJob, described, run_on_hosts
    from llmtrain.launch.local import caught_signals, clear_failures
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.memory import memory_of
    from llmtrain.run_dir import RunDir, default_run_dir
    from llmtrain.signals import leave

    if request.hostfile is None:
        raise RecipeError(Problem("launch.hostfile", "--hostfile", "is not given", "a file of HOST slots=N lines"))
    declared, _ = load_recipe(request.recipe, request.assignments)
    hosts = read_hosts(request.hostfile, request.include, request.exclude)
    sizes = [len(host.devices) for host in hosts]
    is_even = len(set(sizes)) == 1
    cluster = Cluster(
        nodes=len(hosts) if is_even else sum(sizes),
        devices_per_node=sizes[0] if is_even else 1,
        device=local_cluster().device,
    )
    folder = RunDir(run_dir) if (run_dir := request.run_dir) else default_run_dir(declared, _variant(request.recipe))
    plan = startable(declared, cluster, folder, request.resume, sum(sizes))
    console = Console()
    print_plan(plan, console, memory_of(plan))
    console.print(f"hosts    {described(hosts)}", highlight=False, soft_wrap=True)
    clear_failures(folder)
    argv = (*request.argv, "--run-dir", str(folder.path.absolute()))
    job = HostsJob(tuple(hosts), Path(request.argv[0]), argv, folder, request.runner)
    with caught_signals():
        leave(run_on_hosts(job))


def _variant(recipe: str) -> str | None:
    return recipe.partition(":")[2] or None
