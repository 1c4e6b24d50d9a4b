"""`llmtrain train`: which of its launchers does it, and which options each of them takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmtrain.errors import Problem, RecipeError

LauncherName = Literal["local", "torchrun", "accelerate", "deepspeed", "slurm", "kubernetes"]


@dataclass(frozen=True)
class TrainRequest:
    """What the command line says."""

    recipe: str
    assignments: list[str]
    launcher: LauncherName
    nproc: int | None
    run_dir: Path | None
    resume: str
    max_steps: int | None
    max_restarts: int
    dry_run: bool
    as_json: bool
    nodes: int | None
    per_node: int | None
    device: str | None
    hostfile: Path | None
    include: str
    exclude: str
    runner: Literal["pdsh", "openmpi"] | None
    slurm: list[str]
    kubernetes: list[str]

    @property
    def cluster(self) -> dict[str, int | str | None]:
        """Option → what was given, of those that name a cluster."""
        return {"--nodes": self.nodes, "--gpus-per-node": self.per_node, "--device": self.device}


def train(request: TrainRequest) -> None:
    """Trains, or prints or submits what does. Raises RecipeError for options of another launcher."""
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
    from llmtrain.commands.on_hosts import HostsRequest, check_hosts, train_on_hosts

    others = {"--nproc": request.nproc, **request.cluster, "--dry-run": request.dry_run, "--json": request.as_json}
    check_hosts({**others, "--max-restarts": request.max_restarts})
    train_on_hosts(
        HostsRequest(
            *(request.recipe, request.assignments, request.hostfile, request.include, request.exclude),
            *(request.runner or "pdsh", request.run_dir, request.resume, request.max_steps),
        )
    )


def _as_job(request: TrainRequest) -> None:
    from llmtrain.commands.job import JobRequest, check_job, enqueue

    check_job(request.nproc, request.as_json, request.max_restarts)
    enqueue(
        JobRequest(
            *(request.recipe, request.assignments, request.nodes, request.per_node, request.device, request.slurm),
            *(request.run_dir, request.resume, request.max_steps, request.dry_run),
        )
    )


def _as_manifest(request: TrainRequest) -> None:
    from llmtrain.commands.manifest import ManifestRequest, check_manifest, print_manifest

    others = {"--nproc": request.nproc, "--json": request.as_json, "--max-restarts": request.max_restarts}
    check_manifest(request.dry_run, others)
    print_manifest(
        ManifestRequest(
            *(request.recipe, request.assignments, request.nodes, request.per_node, request.device),
            *(request.kubernetes, request.run_dir, request.resume, request.max_steps),
        )
    )


def _by_tool(request: TrainRequest) -> None:
    from llmtrain.commands.by_tool import check_by_tool, print_lines
    from llmtrain.commands.start import train_here
    from llmtrain.launch import discover

    tool: Literal["torchrun", "accelerate"] = "torchrun" if request.launcher == "torchrun" else "accelerate"
    others = {"--json": request.as_json, "--max-restarts": request.max_restarts}
    check_by_tool(tool, discover(os.environ, sys.argv), request.dry_run, others, request.cluster)
    what = (request.recipe, request.assignments)
    if request.dry_run:
        shape = (request.nodes, request.per_node, request.device)
        print_lines(tool, *what, request.nproc, shape, request.run_dir, request.resume, request.max_steps)
    else:
        train_here(*what, None, request.nproc, request.run_dir, request.resume, request.max_steps, 0, tool)


def _here(request: TrainRequest) -> None:
    from llmtrain.commands.dry import check_dry_run, run_small
    from llmtrain.commands.start import check_restarts, train_here
    from llmtrain.launch import discover

    rank = discover(os.environ, sys.argv)
    shape = (request.nodes, request.per_node, request.device)
    check_dry_run(request.dry_run, rank is not None, request.nproc, *shape, request.as_json)
    check_restarts(request.max_restarts, request.dry_run, rank)
    what = (request.recipe, request.assignments)
    if request.dry_run:
        run_small(*what, request.nproc, shape, request.run_dir, request.as_json)
    else:
        run_dir, resume, max_steps = request.run_dir, request.resume, request.max_steps
        train_here(*what, rank, request.nproc, run_dir, resume, max_steps, request.max_restarts)
