"""`llmtrain tune`: measures the kernels of a recipe."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.options import JsonOption, RecipeArgument, SetOption, errors_as_json
from llmtrain.errors import Problem, RecipeError
from llmtrain.system.host import MAX_WORKERS, available_cores, busy, cores_used_by_others, max_cores_used_by_others
from llmtrain.system.streams import print_as_is

if TYPE_CHECKING:
    from llmtrain.plan import KernelChoice, Plan

LOOK_S = 1.5
"""Seconds during which the load of other processes is measured before anything is started."""


def tune_kernels(
    recipe: RecipeArgument,
    assignments: SetOption = [],  # noqa: B006  (typer copies it)
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Number of workers that share this machine; default: one per GPU, or one on a CPU.",
            min=1,
            max=MAX_WORKERS,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure which kernels are fastest for a recipe here.

    The result is stored on this machine, and used by runs of the recipe.

    It chooses only what the recipe leaves open (auto): attention, decoder layers, loss; on a CPU also matrix
    products and threads. For comparison, it also measures other micro-batches, and on a CPU other precisions.
    """
    from rich.console import Console

    from llmtrain.plan.described import kernel_choice_lines, model_line

    with errors_as_json(as_json):
        plan, choice = _measured(recipe, assignments, nproc)
    if as_json:
        print(json.dumps(choice.model_dump(mode="json"), indent=2))
        return
    print_as_is(Console(), (model_line(plan), *kernel_choice_lines(choice)))


def _measured(recipe: str, assignments: list[str], nproc: int | None) -> tuple[Plan, KernelChoice]:
    from rich.console import Console

    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.rules import resolve
    from llmtrain.recipe.cluster import local_cluster

    declared, _ = load_recipe(recipe, assignments)
    cluster = local_cluster(nproc)
    plan = resolve(declared, cluster)
    from llmtrain.train.tune.choice import KERNELS, open_kernels  # imports torch, which takes seconds

    if not open_kernels(declared):
        message = "are all set in the recipe, so there is nothing to measure"
        raise RecipeError(Problem("kernels.open", ", ".join(KERNELS), message, "--set kernels.blocks=auto"))
    console = Console(stderr=True)
    if cluster.spec.on_cpu:
        with console.status("checking whether other processes use the cores"):
            _check_quiet()
    with console.status("starting torch") as status:
        from llmtrain.data import Progress, prepare
        from llmtrain.train.tune.choice import threads_of_a_rank
        from llmtrain.train.tune.request import NotMeasuredError, measure

        prepare(plan.recipe, Progress(console))
        device = "cpu" if cluster.spec.on_cpu else "cuda:0"
        try:
            return plan, measure(plan, device, threads_of_a_rank(cluster.world_size), always=True, say=status.update)
        except NotMeasuredError as error:
            raise RecipeError(_not_measured(str(error))) from None


def _check_quiet() -> None:
    """Raises RecipeError if other processes use the cores so much that every measurement would be discarded."""
    others, cores = cores_used_by_others(LOOK_S), available_cores()
    if others > max_cores_used_by_others(cores):
        raise RecipeError(_not_measured(busy(others, cores)))


def _not_measured(why: str) -> Problem:
    fix = "measure again when nothing else is running, or name the kernels"
    return Problem("kernels.measure", "kernels", f"cannot be measured: {why}", fix)
