"""`llmtrain train` with a launcher or as a dry run: the options that each supports, and its actions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from llmtrain.commands.options import errors_as_json
from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.tools import TOOLS
from llmtrain.plan.load import load_recipe
from llmtrain.system.stops import say
from llmtrain.system.streams import print_as_is

if TYPE_CHECKING:
    from llmtrain.commands.train_request import LauncherName, TrainRequest
    from llmtrain.launch import Rank
    from llmtrain.launch.tools import Tool


def print_manual_commands(tool: Tool, request: TrainRequest) -> None:
    """Checks the plan, then prints it to standard error and the command line of each node to standard output."""
    from llmtrain.launch.tools import check_tool, manual_commands
    from llmtrain.run_dir import RunDir
    from llmtrain.train.start import print_plan, startable

    declared, written_for = load_recipe(request.recipe, request.assignments)
    machine = request.cluster(written_for)
    folder = request.folder(declared).path.absolute()
    plan = startable(declared, machine, RunDir(folder, tuple(request.allow_change)), request.resume, machine.world_size)
    check_tool(tool, plan)
    print_plan(plan)
    script = (*request.script(request.absolute_path), "--run-dir", str(folder))
    cluster_options = ("--nodes", str(machine.nodes), "--gpus-per-node", str(machine.devices_per_node))
    planned = ("plan", request.absolute, *request.sets, *cluster_options, "--device", machine.device)
    plan_folder = folder.with_name(f"{folder.name}-plan")
    print("\n".join(manual_commands(tool, plan, script, plan_folder, planned)))


def run_dry_run(request: TrainRequest) -> None:
    """Runs the scaled-down plan and prints the report, which is also written next to the real run's directory."""
    from rich.console import Console

    from llmtrain.overrides import untried_versions
    from llmtrain.run_dir import RunDir
    from llmtrain.train.start import check_stages, runnable_plan
    from llmtrain.trials.dry_run.run import REPORT, dry_run

    with errors_as_json(request.as_json, passed=False):
        declared, written_for = load_recipe(request.recipe, request.assignments)
        run_folder = request.folder(declared).path
        run_folder = run_folder if run_folder.name else run_folder.resolve()
        folder = RunDir(run_folder.parent / f"{run_folder.name}-dry-run")
        plan = runnable_plan(declared, request.cluster(written_for))
        check_stages(plan)
        for line in untried_versions():
            say(f"warning: {line}")
        report = dry_run(plan, folder)
    if request.as_json:
        print(json.dumps(report.document(), indent=2))
        print(f"report {folder.path / REPORT}", file=sys.stderr)
        return
    console = Console()
    print_as_is(console, report.lines())
    console.print(report.table())
    print_as_is(console, [f"report {folder.path / REPORT}"])


def submit_job(request: TrainRequest) -> None:
    """Runs all checks that are possible before the job starts, then prints its script or submits it."""
    from llmtrain.checkpoint.before import check_resume
    from llmtrain.launch.jobs.slurm import (
        SlurmJob,
        SlurmOptions,
        monitoring_lines,
        parse_job_options,
        render_job,
        submit,
    )
    from llmtrain.recipe.cluster import Cluster
    from llmtrain.run_dir import RunDir
    from llmtrain.train.start import print_plan, startable

    options, resume = parse_job_options(SlurmOptions, "slurm", request.slurm), request.resume
    declared, written_for = load_recipe(request.recipe, request.assignments)
    cluster = request.cluster(written_for)
    machines = cluster.nodes
    if options.tasks:
        cluster = Cluster(nodes=options.tasks, device=cluster.device)
    folder = request.folder(declared)
    path, arguments = folder.path.absolute(), (request.absolute, *request.arguments)
    for choice in options.sweep:
        varied, _ = load_recipe(request.recipe, [*request.assignments, choice])
        choice_folder = RunDir(path / choice.replace("/", "_"), folder.allowed)
        startable(varied, cluster, choice_folder, resume, cluster.world_size)
    if not options.sweep:
        arguments = (*arguments, "--run-dir", str(path))
        plan = startable(declared, cluster, folder, resume, cluster.world_size)
        check_resume(plan, folder, resume, is_local=False)
        print_plan(plan)
    job = SlurmJob(declared.name, cluster, machines, arguments, path, Path.cwd(), options)
    script = render_job(job)
    if request.dry_run:
        print(script, end="")
    else:
        print("\n".join(monitoring_lines(job, submit(script))))


def print_manifest(request: TrainRequest) -> None:
    """Checks the plan, then prints it to standard error and its manifest to standard output."""
    from llmtrain.launch.jobs.kubernetes import KubernetesOptions, render_manifest
    from llmtrain.launch.jobs.slurm import parse_job_options
    from llmtrain.train.start import print_plan, runnable_plan

    options = parse_job_options(KubernetesOptions, "kubernetes", request.kubernetes)
    declared, written_for = load_recipe(request.recipe, request.assignments)
    cluster = request.cluster(written_for)
    # The run directory is in the pods' file system. A folder with the same path on this machine is unrelated.
    plan = runnable_plan(declared, cluster, cluster.world_size)
    name = "-".join(part for part in (declared.name, request.variant) if part)
    run_dir = PurePosixPath(request.run_dir or f"{options.mount}/runs/{name}")
    # The recipe's path is kept as given: it is a path inside the image.
    script = (*request.script(request.path), "--run-dir", str(run_dir))
    manifest = render_manifest(declared.name, cluster, script, run_dir, options)
    print_plan(plan)
    print(manifest, end="")


def train_on_hosts(request: TrainRequest) -> None:
    """Runs all checks that are possible before workers start, trains, and exits with the job's exit code."""
    from rich.console import Console

    from llmtrain.launch.failure import clear_failures
    from llmtrain.launch.hostfile import read_hosts
    from llmtrain.launch.hosts import HostsJob, run_on_hosts
    from llmtrain.recipe.cluster import Cluster, local_cluster
    from llmtrain.system.stops import caught_signals, leave
    from llmtrain.train.start import print_plan, startable

    if request.hostfile is None:
        raise RecipeError(
            Problem("launch.hostfile", "--hostfile", "is required", "name a file with lines of the form HOST slots=N")
        )
    declared, _ = load_recipe(request.recipe, request.assignments)
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
    print_plan(plan, console)
    listed = ", ".join(f"{host.name} × {len(host.devices)}" for host in hosts)
    print_as_is(console, [f"hosts    {listed}"])
    clear_failures(folder)
    argv = (*request.script(request.absolute_path), "--run-dir", str(folder.path.absolute()))
    job = HostsJob(tuple(hosts), Path(request.absolute_path), argv, folder, request.runner or "pdsh")
    with caught_signals():
        leave(run_on_hosts(job))


HERE: tuple[LauncherName, ...] = ("local", *TOOLS)
"""Launchers that start workers on this machine only."""
_DRY_HERE = tuple(f"{launcher} --dry-run" for launcher in HERE)
_SLURM, _KUBERNETES = ("slurm", "slurm --dry-run"), ("kubernetes", "kubernetes --dry-run")
SUPPORTED: dict[str, tuple[str, ...]] = {
    "nproc": (*HERE, *_DRY_HERE),
    "max_restarts": ("local",),
    "launched_by": ("local",),
    "dry_run": (*_SLURM, *_KUBERNETES, *_DRY_HERE),
    "as_json": ("local --dry-run",),
    # Without --dry-run, local launchers use the devices of this machine.
    **dict.fromkeys(("nodes", "gpus_per_node", "device"), (*_SLURM, *_KUBERNETES, *_DRY_HERE)),
    **dict.fromkeys(("hostfile", "include", "exclude", "runner"), ("deepspeed",)),
    "slurm": _SLURM,
    "kubernetes": _KUBERNETES,
}
"""Field of `TrainRequest` → values of --launcher that support the option. Fields that are not listed always work."""


def check_options(request: TrainRequest, rank: Rank | None) -> None:
    """Raises RecipeError for options that exclude each other. rank: as for `_in_conflict`."""
    if problems := [*_unsupported(request), *_in_conflict(request, rank)]:
        raise RecipeError(problems)


def launch(request: TrainRequest) -> None:
    """Makes a dry run, trains on other hosts, or prints or submits a job."""
    if request.launcher == "deepspeed":
        train_on_hosts(request)
    elif request.launcher == "slurm":
        submit_job(request)
    elif request.launcher == "kubernetes":
        print_manifest(request)
    elif request.launcher == "local":
        run_dry_run(request)
    else:
        print_manual_commands(request.launcher, request)


def _unsupported(request: TrainRequest) -> Iterator[Problem]:
    """Yields a problem for each option that the launcher does not support."""
    launcher = request.launcher + " --dry-run" * request.dry_run
    instead = {
        ("nproc", "slurm"): "--gpus-per-node",
        ("max_restarts", "slurm"): f"a job restarts itself: --slurm max_requeues={request.max_restarts}",
    }
    for field, launchers in SUPPORTED.items():
        if getattr(request, field) and launcher not in launchers:
            message = f"is not supported with --launcher {launcher}"
            similar = [name for name in launchers if name.startswith(request.launcher)] or launchers
            fix = f"leave it out, or use --launcher {' or '.join(similar)}"
            yield Problem("launch.options", option_name(field), message, instead.get((field, request.launcher), fix))


def option_name(field: str) -> str:
    """Returns the command-line name of a field of `TrainRequest`."""
    return f"--{field.removeprefix('as_').replace('_', '-')}"


def _in_conflict(request: TrainRequest, rank: Rank | None) -> Iterator[Problem]:
    """Yields a problem for each option that conflicts with others, or with the role of this process.

    rank: the rank of this process if a launcher started it as a worker; otherwise None.
    """
    rule = "launch.options"
    if request.launcher == "kubernetes" and not request.dry_run:
        message = "only prints the manifest, so that you can inspect it before you apply it"
        yield Problem(rule, "--launcher kubernetes", message, "--dry-run | kubectl apply -f -")
    if request.dry_run and request.nproc and (request.nodes or request.gpus_per_node or request.device):
        message = "sets the workers of this machine, but --nodes, --gpus-per-node and --device describe another cluster"
        yield Problem(rule, "--nproc", message, "leave one of them out")
    if rank is None:
        return
    started = f"but {rank.launcher} has started this process as a worker"
    if request.launcher != "local":
        yield Problem(rule, f"--launcher {request.launcher}", f"starts workers, {started}", "leave it out")
    elif request.dry_run:
        yield Problem(rule, "--dry-run", f"starts its own workers, {started}", "llmtrain train RECIPE --dry-run")
    elif request.max_restarts:
        fix = f"torchrun --max-restarts={request.max_restarts} ..." if rank.launcher == "torchrun" else "leave it out"
        message = f"is for the process that starts the workers, {started}"
        yield Problem("launch.restarts", "--max-restarts", message, fix)
