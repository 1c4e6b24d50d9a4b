"""`llmtrain train`: trains on this machine, as the launcher or as a worker. `launchers.py` has the other launchers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.commands.train_request import TrainRequest
from llmtrain.errors import UserError
from llmtrain.system.stops import leave, say, stop_by_exception
from llmtrain.system.streams import ignore_output_errors

if TYPE_CHECKING:
    from llmtrain.launch import Rank
    from llmtrain.recipe import Recipe
    from llmtrain.run_dir import RunDir


def train_recipe(request: TrainRequest) -> None:
    """Train a recipe, or continue its run.

    The command starts the workers on this machine, or submits a job (--launcher). If another launcher started it, it
    becomes one of the workers.

    --nodes, --gpus-per-node and --device describe the cluster of a job or of a dry run; default: the recipe's own
    cluster. A dry run with --nproc plans for that many workers on this machine.
    """
    stop_by_exception()
    from llmtrain.commands.launchers import HERE, check_options, launch
    from llmtrain.launch import discover, named_launcher
    from llmtrain.run_dir import check_allowed

    ignore_output_errors()
    folder, path = str(Path(request.absolute_path).parent), request.launched_by
    named = named_launcher(path, folder) if path and request.launcher in HERE else None
    rank = discover(os.environ, sys.argv, named) if request.launcher in HERE else None
    check_options(request, rank)
    check_allowed(request.allow_change)
    if request.dry_run or request.launcher not in HERE:
        launch(request)
    else:
        train_here(request, rank)


def train_here(request: TrainRequest, rank: Rank | None) -> None:
    """Trains as worker `rank` if a launcher started this process; otherwise starts the workers."""
    if rank is None:
        from llmtrain.plan.load import load_recipe
        from llmtrain.train.start import LocalStart

        def load() -> tuple[Recipe, RunDir]:
            declared, _ = load_recipe(request.recipe, request.assignments)
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
    from llmtrain.recipe.cluster import Cluster, local_cluster
    from llmtrain.train.signals import StopSignals

    signals = StopSignals()
    from llmtrain.launch.disks import check_disks
    from llmtrain.plan.ds_config import render
    from llmtrain.plan.load import load_recipe
    from llmtrain.run_dir.lock import RunLock
    from llmtrain.train.start import configure_thread_waiting, offer_self_test, startable
    from llmtrain.train.worker import train_rank

    declared, _ = load_recipe(request.recipe, request.assignments)
    nodes, per_node = rank.shape
    cluster = Cluster(nodes=nodes, devices_per_node=per_node, device=local_cluster(1).device)
    if cluster.spec.on_cpu and per_node == 1:  # with more ranks, their start would count as load of other processes
        configure_thread_waiting(1)
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
        offer_self_test(local_cluster())
        lock = RunLock.take(folder.path, say)
        folder.create(plan, ds_config)
        folder.write_launch(rank.launcher, rank.world_size, sys.argv)
    resume, max_steps = request.resume, request.max_steps
    train_rank(rank, folder, plan, ds_config, resume=resume, max_steps=max_steps, signals=signals, lock=lock)
