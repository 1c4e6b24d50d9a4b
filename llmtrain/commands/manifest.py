"""`llmtrain train --launcher kubernetes --dry-run`: a plan as a JobSet, printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llmtrain.commands.options import named_cluster, script_of
from llmtrain.commands.shown import print_plan
from llmtrain.errors import Problem, RecipeError


@dataclass(frozen=True)
class ManifestRequest:
    """What the command line says of the job."""

    recipe: str
    assignments: list[str]
    nodes: int | None
    per_node: int | None
    device: str | None
    options: list[str]
    run_dir: Path | None
    resume: str
    max_steps: int | None


def check_manifest(dry_run: bool, others: Mapping[str, object]) -> None:
    """Raises RecipeError for options that are not of a manifest. others: option → what was given."""
    rule = "launch.options"
    problems = [
        Problem(rule, name, "was given, but is no option of --launcher kubernetes", "leave it out")
        for name, value in others.items()
        if value
    ]
    if not dry_run:
        message = "only prints: what is applied to a cluster is yours to see before"
        problems.append(Problem(rule, "--launcher kubernetes", message, "--dry-run | kubectl apply -f -"))
    if problems:
        raise RecipeError(problems)


def print_manifest(request: ManifestRequest) -> None:
    """Checks the plan, and prints it on standard error, and its manifest on standard output."""
    from rich.console import Console

    from llmtrain.launch.kubernetes import Manifest, parse_options, render_manifest
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.memory import memory_of
    from llmtrain.precheck import runnable_plan

    options = parse_options(request.options)
    declared, written_for = load_recipe(request.recipe, request.assignments)
    cluster = named_cluster(written_for, request.nodes, request.per_node, request.device)
    # The run directory is one of the pods': what may lie at its path here is none of its.
    plan = runnable_plan(declared, cluster, cluster.world_size)
    name = "-".join(part for part in (declared.name, request.recipe.partition(":")[2]) if part)
    run_dir = PurePosixPath(request.run_dir or f"{options.mount}/runs/{name}")
    _, *arguments = script_of(request.recipe, request.assignments, request.resume, request.max_steps)
    path = request.recipe.partition(":")[0]  # as it was given: in the image
    script = (path, *arguments, "--run-dir", str(run_dir))
    manifest = render_manifest(Manifest(declared.name, cluster, script, run_dir, options))
    print_plan(plan, Console(stderr=True), memory_of(plan))
    print(manifest, end="")
