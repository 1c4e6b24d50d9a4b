"""`llmtrain train --launcher slurm`: prints or submits the script of a job."""

from __future__ import annotations

from pathlib import Path

from llmtrain.commands.request import TrainRequest
from llmtrain.commands.shown import print_plan
from llmtrain.commands.start import startable


def enqueue(request: TrainRequest) -> None:
    """Checks everything that can be checked before the job starts, then prints its script or submits it."""
    from rich.console import Console

    from llmtrain.checkpoint.before import check_resume
    from llmtrain.cluster import Cluster
    from llmtrain.launch.slurm import Job, following, parse_options, render_job, submit
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.memory import memory_of
    from llmtrain.run_dir import RunDir

    options, resume = parse_options(request.slurm), request.resume
    declared, written_for = request.load()
    cluster = request.cluster(written_for)
    machines = cluster.nodes
    if options.tasks:
        cluster = Cluster(nodes=options.tasks, device=cluster.device)
    folder = request.folder(declared)
    path, arguments = folder.path.absolute(), (request.absolute, *request.arguments)
    for choice in options.sweep:
        varied, _ = load_recipe(request.recipe, [*request.assignments, choice])
        startable(varied, cluster, RunDir(path / choice.replace("/", "_")), resume, cluster.world_size)
    if not options.sweep:
        arguments = (*arguments, "--run-dir", str(path))
        plan = startable(declared, cluster, folder, resume, cluster.world_size)
        check_resume(plan, folder, resume, is_local=False)
        print_plan(plan, Console(stderr=True), memory_of(plan))
    job = Job(declared.name, cluster, machines, arguments, path, Path.cwd(), options)
    script = render_job(job)
    if request.dry_run:
        print(script, end="")
    else:
        print("\n".join(following(job, submit(script))))
