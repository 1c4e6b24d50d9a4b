"""`llmtrain train` on this machine, and the checks that are made before workers start on any machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmtrain.commands.plan import (
    MOST_WORKERS,
    DeviceOption,
    NodesOption,
    PerNodeOption,
    RecipeArgument,
    SetOption,
    named_cluster,
    print_plan,
)
from llmtrain.errors import Exit, UserError
from llmtrain.system.host import sleep_beside_others
from llmtrain.system.stops import leave

if TYPE_CHECKING:
    from rich.console import Console

    from llmtrain.cluster import Cluster
    from llmtrain.launch import Rank
    from llmtrain.launch.template import Template
    from llmtrain.launch.tools import Tool
    from llmtrain.plan import Plan
    from llmtrain.recipe import Recipe
    from llmtrain.run_dir import RunDir


LauncherName = Literal["local", "torchrun", "accelerate", "deepspeed", "slurm", "kubernetes"]


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """All options of the command line, as given."""

    recipe: RecipeArgument
    """Path of the recipe's file, optionally followed by `:VARIANT`."""
    assignments: SetOption = field(default_factory=list)
    nproc: Annotated[
        int | None,
        typer.Option(help="Number of workers; default: one per GPU, or one on a CPU.", min=1, max=MOST_WORKERS),
    ] = None
    run_dir: Annotated[Path | None, typer.Option(help="Run directory; default: runs/NAME[-VARIANT].")] = None
    resume: Annotated[
        str,
        typer.Option(
            help="auto: continue from the newest checkpoint, if any; never: start anew; or a checkpoint folder."
        ),
    ] = "auto"
    max_steps: Annotated[int | None, typer.Option(help="Stop after this step and save a checkpoint.", min=1)] = None
    max_restarts: Annotated[
        int, typer.Option(help="How many times to restart a job that died, from its last checkpoint.", min=0)
    ] = 0
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Do not train: run a scaled-down copy of the plan here, on CPUs, and report. With "
            "--launcher, print what would be started.",
        ),
    ] = False
    nodes: NodesOption = None
    gpus_per_node: PerNodeOption = None
    device: DeviceOption = None
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print the report as one JSON document.")] = (
        False
    )
    launcher: Annotated[
        LauncherName,
        typer.Option(
            help="torchrun, accelerate: start the workers of this machine with this tool; deepspeed: start "
            "them on the hosts of a hostfile over ssh; slurm: submit a job; kubernetes: print a "
            "manifest (needs --dry-run)."
        ),
    ] = "local"
    hostfile: Annotated[Path | None, typer.Option(help="deepspeed: file with lines of the form HOST slots=N.")] = None
    include: Annotated[str, typer.Option(help="deepspeed: hosts and devices to use, such as h1@h2:0,2.")] = ""
    exclude: Annotated[str, typer.Option(help="deepspeed: hosts and devices to leave out.")] = ""
    runner: Annotated[
        Literal["pdsh", "openmpi"] | None,
        typer.Option(help="deepspeed: how to reach the hosts, like --launcher of `deepspeed` itself; default: pdsh."),
    ] = None
    slurm: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUE",
            help="slurm: an option of the job, such as time=24:00:00 or partition=NAME. Repeatable.",
        ),
    ] = field(default_factory=list)
    kubernetes: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUE",
            help="kubernetes: an option of the manifest, such as image=IMAGE or pvc=CLAIM. Repeatable.",
        ),
    ] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The path of the recipe's file, as given."""
        return self.recipe.partition(":")[0]

    @property
    def variant(self) -> str | None:
        """The recipe's variant, or None."""
        return self.recipe.partition(":")[2] or None

    @property
    def absolute_path(self) -> str:
        """The absolute path of the recipe's file, for use in another working directory."""
        return str(Path(self.path).absolute())

    @property
    def absolute(self) -> str:
        """The recipe argument with an absolute path."""
        return f"{self.absolute_path}{self.recipe.removeprefix(self.path)}"

    @property
    def sets(self) -> tuple[str, ...]:
        """The assignments as command-line options."""
        return tuple(part for assignment in self.assignments for part in ("--set", assignment))

    @property
    def arguments(self) -> tuple[str, ...]:
        """A worker's options after the recipe, without the run directory."""
        steps = ("--max-steps", str(self.max_steps)) if self.max_steps else ()
        return (*self.sets, "--resume", self.resume, *steps)

    def script(self, path: str) -> tuple[str, ...]:
        """Returns the arguments with which a launcher's Python runs a worker, without the run directory.

        path: path of the recipe's file on the worker's machine. The file itself is not run as a program, because it may
        lack the lines for that.
        """
        return ("-m", "llmtrain", "train", f"{path}{self.recipe.removeprefix(self.path)}", *self.arguments)

    def load(self) -> tuple[Recipe, Cluster | None]:
        """Loads the recipe and the cluster that it names, if any. Raises RecipeError as `load_recipe` does."""
        from llmtrain.plan.load import load_recipe

        return load_recipe(self.recipe, self.assignments)

    def cluster(self, written_for: Cluster | None) -> Cluster:
        """Returns the cluster that the options describe: with --nproc, that many workers of this machine.

        Missing options are taken from `written_for` if it is given, otherwise from this machine.
        """
        from llmtrain.cluster import local_cluster

        if self.nproc:
            return local_cluster(self.nproc)
        return named_cluster(written_for, self.nodes, self.gpus_per_node, self.device)

    def folder(self, declared: Recipe) -> RunDir:
        """Returns the run directory: the one given, or the default for the recipe."""
        from llmtrain.run_dir import RunDir, default_run_dir

        return RunDir(self.run_dir) if self.run_dir else default_run_dir(declared, self.variant)


def train_here(request: TrainRequest, rank: Rank | None) -> None:
    """Trains as worker `rank` if a launcher started this process; otherwise starts the workers."""
    if rank is None:

        def load() -> tuple[Recipe, RunDir]:
            declared, _ = request.load()
            return declared, request.folder(declared)

        start = LocalStart(
            load=load,
            nproc=request.nproc,
            resume=request.resume,
            max_steps=request.max_steps,
            max_restarts=request.max_restarts,
            tool=request.launcher if request.launcher in ("torchrun", "accelerate") else None,
            ended=leave,
        )
        sys.exit(start.train())
    else:
        _as_worker(request, rank)


def _as_worker(request: TrainRequest, rank: Rank) -> None:
    from llmtrain.cluster import Cluster, local_cluster
    from llmtrain.train.signals import StopSignals

    signals = StopSignals()
    from llmtrain.ds_config import render
    from llmtrain.launch.disks import check_disks
    from llmtrain.run_dir.lock import RunLock
    from llmtrain.train.worker import train_rank

    declared, _ = request.load()
    nodes, per_node = rank.shape
    cluster = Cluster(nodes=nodes, devices_per_node=per_node, device=local_cluster(1).device)
    if cluster.spec.on_cpu and per_node == 1:  # with more ranks, their start would count as load of other processes
        _settle_threads(1)
    folder = request.folder(declared)
    try:
        plan = startable(declared, cluster, folder, request.resume, rank.world_size)
        check_disks(plan)
    except UserError as error:
        if rank.local_rank == 0:  # on every machine: others may have other files and packages
            raise
        sys.exit(error.exit_code)
    ds_config = render(plan)
    lock = None
    if rank.is_main:
        _offer_self_test(local_cluster())
        lock = RunLock.take(folder.path, _say)
        folder.create(plan, ds_config)
        folder.write_launch(rank.launcher, rank.world_size, sys.argv)
    train_rank(rank, folder, plan, ds_config, request.resume, request.max_steps, signals, lock)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class LocalStart:
    """The start of a job on this machine, with one worker per device."""

    load: Callable[[], tuple[Recipe, RunDir]]
    """Returns the recipe and the run directory."""
    nproc: int | None
    resume: str
    max_steps: int | None
    max_restarts: int
    tool: Tool | None = None
    """The program that starts the workers, or None if this process does."""
    ended: Callable[[int], object] | None = None
    """Called with the exit code, before the usual signal handlers are restored."""

    def train(self) -> int:
        """Trains and returns the exit code."""
        from llmtrain.cluster import local_cluster
        from llmtrain.launch.jobs.accelerate import processes_asked
        from llmtrain.launch.local import common_environment
        from llmtrain.launch.template import Template

        cluster = local_cluster(self.nproc or processes_asked())
        _offer_self_test(cluster)
        if cluster.spec.on_cpu:
            _settle_threads(cluster.devices_per_node)
        with Template() as template:
            forked_from = template if cluster.spec.on_cpu and not self.tool else None
            if forked_from:
                # The imports take longest, so they run while the recipe is checked and the data are prepared.
                forked_from.start(common_environment(cluster.world_size))
            from llmtrain.launch.disks import check_disks

            declared, folder = self.load()
            plan = startable(declared, cluster, folder, self.resume, None)
            check_disks(plan)
            return self._launch(plan, folder, forked_from)

    def _launch(self, plan: Plan, folder: RunDir, template: Template | None) -> int:
        """Checks the pipeline's stages, prepares the data, and runs the workers."""
        from llmtrain.checkpoint.before import check_data, check_resume, nothing_left
        from llmtrain.commands.precheck import check_stages
        from llmtrain.data import Progress, Schedule, prepare, report, with_steps
        from llmtrain.ds_config import render
        from llmtrain.launch.local import common_environment
        from llmtrain.launch.tools import check_tool
        from llmtrain.run_dir.lock import RunLock
        from llmtrain.system.stops import caught_signals
        from llmtrain.system.streams import plain_console

        console = plain_console()
        if self.tool:
            check_tool(self.tool, plan)
        print_plan(plan, console)
        if self.resume == "auto" and (reason := nothing_left(plan, folder, self.max_steps)):
            console.print(reason, highlight=False, soft_wrap=True)
            return Exit.DONE
        with RunLock.take(folder.path, _say) as lock:
            checkpoint = check_resume(plan, folder, self.resume, is_local=True)
            if template:  # restarted if a single worker drives all devices
                template.start(common_environment(plan.workers))
            check_stages(plan)
            prepared = prepare(plan.recipe, Progress(console))
            plan = with_steps(plan, prepared)
            console.print(report(prepared, plan.recipe))
            if plan.recipe.train.epochs and (reason := nothing_left(plan, folder, self.max_steps)):
                console.print(reason, highlight=False, soft_wrap=True)
                return Exit.DONE
            if checkpoint:
                check_data(checkpoint, prepared.key)
            Schedule.of(plan, prepared, dp_rank=0)  # refuses data shorter than a batch before anything is started
            folder.create(plan, render(plan))
            console.print(f"run directory {folder.path}", highlight=False, soft_wrap=True)
            with caught_signals():
                # Batch systems repeat signals. One that arrives after the end must not change the exit code.
                code = self._run(plan, folder, template, console)
                lock.release()
                if self.ended:
                    self.ended(code)
                return code

    def _run(self, plan: Plan, folder: RunDir, template: Template | None, console: Console) -> int:
        """Runs the workers and returns the exit code."""
        from llmtrain.launch.tools import ToolJob, run_by_tool
        from llmtrain.train.restart import train_with_restarts

        arguments = [f"--run-dir={folder.path}", *(["--max-steps", str(self.max_steps)] if self.max_steps else [])]
        if self.tool:
            console.print(f"starting workers with {self.tool}")
            return run_by_tool(ToolJob(self.tool, plan, folder, (*arguments, "--resume", self.resume)))
        command = [sys.executable, "-m", "llmtrain.train.worker", *arguments]
        restarts, allowed_s = self.max_restarts, plan.recipe.watchdog.min_seconds
        code = train_with_restarts(command, plan.workers, folder, self.resume, restarts, console, template, allowed_s)
        if template:
            template.close()
        return code


def _offer_self_test(cluster: Cluster) -> None:
    """Suggests the self-test on a machine with untested GPUs, once per type of device."""
    from llmtrain.cluster import self_test_folder

    offered = self_test_folder() / f"offered_{cluster.device}"
    if cluster.spec.on_cpu or cluster.measured or offered.exists():
        return
    _say("these GPUs have not been tested with llmtrain; `llmtrain doctor --self-test` takes a minute (shown once)")
    with suppress(OSError):
        offered.parent.mkdir(parents=True, exist_ok=True)
        offered.touch()


def _settle_threads(ranks: int) -> None:
    """Chooses how the threads of this host's ranks wait for each other. Called before torch is loaded."""
    if line := sleep_beside_others(os.environ, ranks):
        print(line, flush=True)


def runnable_plan(recipe: Recipe, cluster: Cluster, workers: int | None = None) -> Plan:
    """Returns the plan of a recipe that can be started here. workers: as for `check_runnable`.

    Raises RecipeError with all faults and the nearest legal plans.
    """
    from llmtrain.plan.installed import check_runnable
    from llmtrain.rules import resolve
    from llmtrain.search.cheapest import suggesting

    with suggesting(recipe, cluster):
        plan = resolve(recipe, cluster)
        check_runnable(plan, workers)
    return plan


def startable(declared: Recipe, cluster: Cluster, folder: RunDir, resume: str, workers: int | None) -> Plan:
    """Returns the resolved plan after every check that needs no worker.

    workers: the number of workers that a launcher started; None without a launcher.
    """
    from llmtrain.checkpoint.before import check_choice
    from llmtrain.metrics.trackers import check_trackers
    from llmtrain.train.tasks import check_harness

    plan = runnable_plan(declared, cluster, workers)
    check_trackers(declared)
    if declared.tasks.names:
        check_harness()
    folder.check(declared)
    check_choice(folder, resume)
    return plan
