"""`llmtrain train --launcher deepspeed`: starts workers on the hosts of a hostfile."""

from __future__ import annotations

from pathlib import Path

from llmtrain.commands.request import TrainRequest
from llmtrain.commands.shown import print_plan
from llmtrain.commands.start import startable
from llmtrain.errors import Problem, RecipeError


def train_on_hosts(request: TrainRequest) -> None:
    """Checks everything that can be checked before workers start, trains, and exits with the job's exit code."""
    from rich.console import Console

    from llmtrain.cluster import Cluster, local_cluster
    from llmtrain.launch.hostfile import read_hosts
    from llmtrain.launch.hosts import HostsJob, described, run_on_hosts
    from llmtrain.launch.local import clear_failures
    from llmtrain.plan.memory import memory_of
    from llmtrain.stops import caught_signals, leave

    if request.hostfile is None:
        raise RecipeError(
            Problem("launch.hostfile", "--hostfile", "is required", "name a file with lines of the form HOST slots=N")
        )
    declared, _ = request.load()
    hosts = read_hosts(request.hostfile, request.include, request.exclude)
    sizes = [len(host.devices) for host in hosts]
    is_even = len(set(sizes)) == 1
    cluster = Cluster(
        nodes=len(hosts) if is_even else sum(sizes),
        devices_per_node=sizes[0] if is_even else 1,
        device=local_cluster().device,
    )
    folder = request.folder(declared)
    plan = startable(declared, cluster, folder, request.resume, sum(sizes))
    console = Console()
    print_plan(plan, console, memory_of(plan))
    console.print(f"hosts    {described(hosts)}", highlight=False, soft_wrap=True)
    clear_failures(folder)
    argv = (*request.script, "--run-dir", str(folder.path.absolute()))
    job = HostsJob(tuple(hosts), Path(argv[0]), argv, folder, request.runner or "pdsh")
    with caught_signals():
        leave(run_on_hosts(job))
