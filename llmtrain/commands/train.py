"""`llmtrain train`: dispatches to the launcher, and checks which options it supports."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from llmtrain.commands.request import LauncherName, TrainRequest
from llmtrain.errors import Problem, RecipeError
from llmtrain.streams import outlive_the_terminal

if TYPE_CHECKING:
    from llmtrain.launch import Rank

HERE: tuple[LauncherName, ...] = ("local", "torchrun", "accelerate")
"""Launchers that start the workers of this machine."""
When = Literal["always", "without --dry-run", "with --dry-run"]
ONLY_HERE: dict[LauncherName, When] = dict.fromkeys(HERE, "always")
CLUSTER: dict[LauncherName, When] = {
    # Without --dry-run these take the devices of this machine.
    **dict.fromkeys(HERE, "with --dry-run"),
    "slurm": "always",
    "kubernetes": "always",
}
HOSTS: dict[LauncherName, When] = {"deepspeed": "always"}
SUPPORTED: dict[str, dict[LauncherName, When]] = {
    "nproc": ONLY_HERE,
    "max_restarts": {"local": "without --dry-run"},
    "dry_run": {**ONLY_HERE, "slurm": "always", "kubernetes": "always"},
    "as_json": {"local": "with --dry-run"},
    **dict.fromkeys(("nodes", "gpus_per_node", "device"), CLUSTER),
    **dict.fromkeys(("hostfile", "include", "exclude", "runner"), HOSTS),
    "slurm": {"slurm": "always"},
    "kubernetes": {"kubernetes": "always"},
}
"""Field of `TrainRequest` → the launchers that support the option, and when. All launchers support the other fields."""


def train(request: TrainRequest) -> None:
    """Trains, or prints or submits the job. Raises RecipeError for options that do not go together."""
    from llmtrain.launch import discover

    outlive_the_terminal()
    rank = discover(os.environ, sys.argv) if request.launcher in HERE else None
    if problems := [*_unsupported(request), *_in_conflict(request, rank)]:
        raise RecipeError(problems)
    if request.launcher == "deepspeed":
        from llmtrain.commands.on_hosts import train_on_hosts

        train_on_hosts(request)
    elif request.launcher == "slurm":
        from llmtrain.commands.job import enqueue

        enqueue(request)
    elif request.launcher == "kubernetes":
        from llmtrain.commands.manifest import print_manifest

        print_manifest(request)
    elif not request.dry_run:
        from llmtrain.commands.start import train_here

        train_here(request, rank, tool=None if request.launcher == "local" else request.launcher)
    elif request.launcher == "local":
        from llmtrain.commands.dry import run_small

        run_small(request)
    else:
        from llmtrain.commands.by_tool import print_lines

        print_lines(request.launcher, request)


def _unsupported(request: TrainRequest) -> Iterator[Problem]:
    """Yields a problem for each option that the launcher does not support."""
    launcher = request.launcher
    instead = {
        ("nproc", "slurm"): "--gpus-per-node",
        ("max_restarts", "slurm"): f"a job starts itself again: --slurm max_requeues={request.max_restarts}",
    }
    for field, launchers in SUPPORTED.items():
        when, option = launchers.get(launcher), option_name(field)
        if not getattr(request, field) or when == "always":
            continue
        if when is None:
            message = f"is not supported with --launcher {launcher}"
            fix = f"leave it out, or use --launcher {', '.join(launchers)}"
            yield Problem("launch.options", option, message, instead.get((field, launcher), fix))
        elif when == "with --dry-run" and not request.dry_run:
            message = f"is supported only with --dry-run by --launcher {launcher}"
            yield Problem("launch.options", option, message, "add --dry-run, or leave it out")
        elif when == "without --dry-run" and request.dry_run:
            yield Problem("launch.options", option, "is not supported with --dry-run", "leave it out")


def option_name(field: str) -> str:
    """Returns the name on the command line of a field of `TrainRequest`."""
    return f"--{field.removeprefix('as_').replace('_', '-')}"


def _in_conflict(request: TrainRequest, rank: Rank | None) -> Iterator[Problem]:
    """Yields a problem for each option that conflicts with others, or with the role of this process.

    rank: the worker that a launcher has started this process as, if any.
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
