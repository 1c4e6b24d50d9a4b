"""`llmtrain train --launcher kubernetes --dry-run`: prints a plan as a JobSet."""

from __future__ import annotations

from pathlib import PurePosixPath

from llmtrain.commands.request import TrainRequest
from llmtrain.commands.shown import print_plan


def print_manifest(request: TrainRequest) -> None:
    """Checks the plan, then prints it on standard error and its manifest on standard output."""
    from rich.console import Console

    from llmtrain.launch.kubernetes import Manifest, parse_options, render_manifest
    from llmtrain.plan.memory import memory_of
    from llmtrain.precheck import runnable_plan

    options = parse_options(request.kubernetes)
    declared, written_for = request.load()
    cluster = request.cluster(written_for)
    # The run directory lies in the pods' file system: a folder of the same path on this machine is unrelated.
    plan = runnable_plan(declared, cluster, cluster.world_size)
    name = "-".join(part for part in (declared.name, request.variant) if part)
    run_dir = PurePosixPath(request.run_dir or f"{options.mount}/runs/{name}")
    _, *arguments = request.script
    # The recipe's path is kept as given: it is a path inside the image.
    script = (request.path, *arguments, "--run-dir", str(run_dir))
    manifest = render_manifest(Manifest(declared.name, cluster, script, run_dir, options))
    print_plan(plan, Console(stderr=True), memory_of(plan))
    print(manifest, end="")
