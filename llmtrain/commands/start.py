"""`llmtrain train` on this machine, and the checks that precede the start of workers on any machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.commands.plan import print_plan
from llmtrain.commands.request import TrainRequest
from llmtrain.errors import CheckpointError, Exit, MachineError, Problem, RecipeError, UserError
from llmtrain.system.host import sleep_beside_others

if TYPE_CHECKING:
    from rich.console import Console

    from llmtrain.cluster import Cluster
    from llmtrain.launch import Rank
    from llmtrain.launch.template import Template
    from llmtrain.launch.tools import Tool
    from llmtrain.plan import Plan
    from llmtrain.run_dir import RunDir


def train_here(request: TrainRequest, rank: Rank | None, tool: Tool | None = None) -> None:
    """Acts as worker `rank` of the launcher that started this process, or starts the workers itself.

    tool: the program that starts the workers instead of this process.
    """
    if rank is None:
        _as_launcher(request, tool)
    else:
        _as_worker(request, rank)


def _as_worker(request: TrainRequest, rank: Rank) -> None:
    from llmtrain.cluster import Cluster, local_cluster
    from llmtrain.train.signals import StopSignals

    signals = StopSignals()
    from llmtrain.commands.precheck import check_machine
    from llmtrain.ds_config import render
    from llmtrain.run_lock import RunLock
    from llmtrain.train.worker import work

    declared, _ = request.load()
    nodes, per_node = rank.shape
    cluster = Cluster(nodes=nodes, devices_per_node=per_node, device=local_cluster(1).device)
    if cluster.spec.on_cpu and per_node == 1:  # with more ranks, their own start would be counted as load by others
        _settle_threads(1)
    folder = request.folder(declared)
    try:
        plan = startable(declared, cluster, folder, request.resume, rank.world_size)
        check_machine(plan)
    except UserError as error:
        if not _speaks(rank, error):
            sys.exit(error.exit_code)
        raise
    ds_config = render(plan)
    lock = None
    if rank.is_main:
        lock = RunLock.take(folder.path, _say)
        folder.create(plan, ds_config)
        folder.write_launch(rank.launcher, rank.world_size, sys.argv)
    work(rank, folder, plan, ds_config, request.resume, request.max_steps, signals, lock)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _as_launcher(request: TrainRequest, tool: Tool | None) -> None:
    from llmtrain.cluster import local_cluster
    from llmtrain.launch.jobs.accelerate import processes_asked
    from llmtrain.launch.local import common_environment
    from llmtrain.launch.template import Template

    cluster = local_cluster(request.nproc or processes_asked())
    if cluster.spec.on_cpu:
        _settle_threads(cluster.devices_per_node)
    with Template() as template:
        forked_from = template if cluster.spec.on_cpu and not tool else None
        if forked_from:
            # Its imports take longest, so they run while the recipe is checked and the data are prepared.
            forked_from.start(common_environment(cluster.world_size))
        from llmtrain.commands.precheck import check_machine
        from llmtrain.ds_config import render

        declared, _ = request.load()
        folder = request.folder(declared)
        plan = startable(declared, cluster, folder, request.resume, None)
        check_machine(plan)
        sys.exit(_launch(request, plan, render(plan), folder, tool, forked_from))


def _settle_threads(ranks: int) -> None:
    """Chooses how the threads of this host's ranks wait for each other, before torch is loaded."""
    if line := sleep_beside_others(os.environ, ranks):
        print(line, flush=True)


def _speaks(rank: Rank, error: UserError) -> bool:
    """Whether this worker prints an error: rank 0 does, except for a machine's error, which its local rank 0 prints."""
    return rank.local_rank == 0 if isinstance(error, MachineError) else rank.is_main


def startable(declared: Any, cluster: Cluster, folder: RunDir, resume: str, workers: int | None) -> Plan:
    """Resolves the plan and runs every check that needs no worker.

    workers: the number of workers that a launcher started, if one did.
    """
    from llmtrain.commands.precheck import runnable_plan
    from llmtrain.metrics.trackers import check_trackers

    plan = runnable_plan(declared, cluster, workers)
    check_trackers(declared)
    folder.check(declared)
    if resume == "never" and any(folder.checkpoints.glob("step_*")):
        raise RecipeError(
            Problem(
                "resume.never",
                "--resume",
                f"{folder.path} holds checkpoints, which a new run would overwrite",
                "choose another --run-dir, or continue with --resume auto",
            )
        )
    if resume not in ("auto", "never"):
        _check_named(Path(resume), folder)
    return plan


def _check_named(checkpoint: Path, folder: RunDir) -> None:
    """Refuses a folder without a checkpoint, and another run's checkpoint if this run has checkpoints of its own."""
    from llmtrain.checkpoint.manifest import manifest_files

    if not manifest_files(checkpoint):
        raise CheckpointError(Problem("resume.path", "--resume", f"{checkpoint} is not a checkpoint folder"))
    is_own = checkpoint.resolve().parent == folder.checkpoints.resolve()
    if not is_own and any(folder.checkpoints.glob("step_*")):
        message = f"{checkpoint} belongs to another run, and {folder.path} has checkpoints of its own"
        raise CheckpointError(Problem("resume.path", "--resume", message, "choose another --run-dir"))


def _launch(
    request: TrainRequest,
    plan: Plan,
    ds_config: dict[str, Any],
    folder: RunDir,
    tool: Tool | None,
    forked_from: Template | None,
) -> int:
    """Checks the pipeline's stages and prepares the data here, then trains with one worker per device."""
    from rich.console import Console

    from llmtrain.checkpoint.before import check_data, check_resume
    from llmtrain.commands.precheck import check_stages
    from llmtrain.data import Progress, Schedule, prepare, report
    from llmtrain.launch.local import common_environment
    from llmtrain.launch.tools import check_tool
    from llmtrain.predict import memory_of
    from llmtrain.run_lock import RunLock
    from llmtrain.system.stops import caught_signals, leave

    console = Console()
    if tool:
        check_tool(tool, plan)
    print_plan(plan, console, memory_of(plan))
    if request.resume == "auto" and (nothing_left := _nothing_left(plan, folder, request.max_steps)):
        console.print(nothing_left, highlight=False, soft_wrap=True)
        return Exit.DONE
    with RunLock.take(folder.path, _say) as lock:
        checkpoint = check_resume(plan, folder, request.resume, is_local=True)
        if forked_from:
            forked_from.start(common_environment(plan.workers))  # a new one, with one worker that drives all devices
        check_stages(plan)
        prepared = prepare(plan.recipe, Progress(console))
        console.print(report(prepared, plan.recipe))
        if checkpoint:
            check_data(checkpoint, prepared.key)
        Schedule.of(plan, prepared, dp_rank=0)  # reports data too short for a batch before anything is started
        folder.create(plan, ds_config)
        console.print(f"run directory {folder.path}", highlight=False, soft_wrap=True)
        with caught_signals():
            # Batch systems repeat signals: one that arrives after the end must not change the exit code.
            code = _run(request, plan, folder, tool, forked_from, console)
            lock.release()
            leave(code)


def _run(
    request: TrainRequest,
    plan: Plan,
    folder: RunDir,
    tool: Tool | None,
    forked_from: Template | None,
    console: Console,
) -> int:
    """Runs the workers and returns the exit code."""
    from llmtrain.launch.tools import ToolJob, run_by_tool
    from llmtrain.train.restart import train_with_restarts

    arguments = [f"--run-dir={folder.path}", *(["--max-steps", str(request.max_steps)] if request.max_steps else [])]
    if tool:
        console.print(f"starting workers with {tool}")
        return run_by_tool(ToolJob(tool, plan, folder, (*arguments, "--resume", request.resume)))
    command = [sys.executable, "-m", "llmtrain.train.worker", *arguments]
    restarts, allowed_s = request.max_restarts, plan.recipe.watchdog.min_seconds
    code = train_with_restarts(command, plan.workers, folder, request.resume, restarts, console, forked_from, allowed_s)
    if forked_from:
        forked_from.close()
    return code


def _nothing_left(plan: Plan, folder: RunDir, stop_after: int | None) -> str | None:
    """Returns why there is nothing to do, or None if steps or the export of a finished run are missing."""
    from llmtrain.checkpoint.folder import is_exported, newest
    from llmtrain.checkpoint.manifest import already_taken, read_manifests

    checkpoint = newest(folder.checkpoints)
    if checkpoint is None:
        return None
    manifest = read_manifests(checkpoint)[0]
    if manifest.step >= plan.recipe.train.max_steps:
        is_done = not plan.recipe.export.at_end or is_exported(folder.export, manifest)
        return f"{folder.path} is finished: {manifest.step:,} steps" if is_done else None
    return already_taken(folder.path, manifest.step, stop_after)
