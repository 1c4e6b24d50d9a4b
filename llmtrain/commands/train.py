"""`llmtrain train`: which of its launchers does it, and which options each of them takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Literal

from llmtrain.commands.request import LauncherName, TrainRequest
from llmtrain.errors import Problem, RecipeError
from llmtrain.streams import outlive_the_terminal


def train(request: TrainRequest) -> None:
    """Trains, or prints or submits what does. Raises RecipeError for options of another launcher."""
    outlive_the_terminal()
    _check_launcher(request)
    how = {"deepspeed": _on_hosts, "slurm": _as_job, "kubernetes": _as_manifest, "local": _here}
    start: Callable[[TrainRequest], None] = how.get(request.launcher, _by_tool)
    start(request)


def _check_launcher(request: TrainRequest) -> None:
    hosts = {"--hostfile": request.hostfile, "--include": request.include, "--exclude": request.exclude}
    owners: dict[LauncherName, Mapping[str, object]] = {
        "deepspeed": {**hosts, "--runner": request.runner},
        "slurm": {"--slurm": request.slurm},
        "kubernetes": {"--kubernetes": request.kubernetes},
    }
    problems = [
        Problem("launch.options", option, f"was given, and --launcher is {request.launcher}", f"--launcher {owner}")
        for owner, options in owners.items()
        for option, value in options.items()
        if value and owner != request.launcher
    ]
    if problems:
        raise RecipeError(problems)


def _on_hosts(request: TrainRequest) -> None:
    from llmtrain.commands.on_hosts import check_hosts, train_on_hosts

    check_hosts(request)
    train_on_hosts(request)


def _as_job(request: TrainRequest) -> None:
    from llmtrain.commands.job import check_job, enqueue

    check_job(request)
    enqueue(request)


def _as_manifest(request: TrainRequest) -> None:
    from llmtrain.commands.manifest import check_manifest, print_manifest

    check_manifest(request)
    print_manifest(request)


def _by_tool(request: TrainRequest) -> None:
    from llmtrain.commands.by_tool import check_by_tool, print_lines
    from llmtrain.commands.start import train_here
    from llmtrain.launch import discover

    tool: Literal["torchrun", "accelerate"] = "torchrun" if request.launcher == "torchrun" else "accelerate"
    check_by_tool(tool, discover(os.environ, sys.argv), request)
    if request.dry_run:
        print_lines(tool, request)
    else:
        train_here(request, rank=None, tool=tool)


def _here(request: TrainRequest) -> None:
    from llmtrain.commands.dry import check_dry_run, run_small
    from llmtrain.commands.start import check_restarts, train_here
    from llmtrain.launch import discover

    rank = discover(os.environ, sys.argv)
    check_dry_run(request, is_worker=rank is not None)
    check_restarts(request, rank)
    if request.dry_run:
        run_small(request)
    else:
        train_here(request, rank)
