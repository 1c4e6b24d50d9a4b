"""`llmtrain train --launcher slurm`: the script of a job, printed or submitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmtrain.commands.options import named_cluster
from llmtrain.commands.shown import print_plan
from llmtrain.commands.start import startable
from llmtrain.errors import Problem, RecipeError


@dataclass(frozen=True)
class JobRequest:
    """What the command line says of a job."""

    recipe: str
    assignments: list[str]
    nodes: int | None
    per_node: int | None
    device: str | None
    options: list[str]
    run_dir: Path | None
    resume: str
    max_steps: int | None
    only_print: bool
    """Print the script and submit nothing."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """`llmtrain train` as the workers of the job call it, but for the run directory."""
        path, colon, variant = self.recipe.partition(":")
        sets = (part for assignment in self.assignments for part in ("--set", assignment))
        steps = ("--max-steps", str(self.max_steps)) if self.max_steps else ()
        return (f"{Path(path).absolute()}{colon}{variant}", *sets, "--resume", self.resume, *steps)


def check_job(nproc: int | None, as_json: bool, max_restarts: int) -> None:
    """Raises RecipeError for options that are not a job's."""
    fixes = {
        "--nproc": (nproc, "--gpus-per-node"),
        "--json": (as_json, "leave it out"),
        "--max-restarts": (max_restarts, f"a job starts itself again: --slurm max_requeues={max_restarts}"),
    }
    problems = [
        Problem("launch.options", name, "was given, but is no option of a job", fix)
        for name, (value, fix) in fixes.items()
        if value
    ]
    if problems:
        raise RecipeError(problems)


def enqueue(request: JobRequest) -> None:
    """Checks everything that can be known before a job starts, then prints its script or submits it."""
    from rich.console import Console

    from llmtrain.checkpoint.before import check_resume
    from llmtrain.cluster import Cluster
    from llmtrain.launch.slurm import Job, following, parse_options, render_job, submit
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.memory import memory_of
    from llmtrain.run_dir import RunDir, default_run_dir

    options, resume = parse_options(request.options), request.resume
    declared, written_for = load_recipe(request.recipe, request.assignments)
    cluster = named_cluster(written_for, request.nodes, request.per_node, request.device)
    machines = cluster.nodes
    if options.tasks:
        cluster = Cluster(nodes=options.tasks, device=cluster.device)
    variant = request.recipe.partition(":")[2] or None
    folder = RunDir(request.run_dir) if request.run_dir else default_run_dir(declared, variant)
    path, arguments = folder.path.absolute(), request.arguments
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
    if request.only_print:
        print(script, end="")
    else:
        print("\n".join(following(job, submit(script))))
