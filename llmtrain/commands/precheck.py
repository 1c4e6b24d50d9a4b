"""Checks before a worker starts: refusals list the nearest legal plans, and a pipeline's stages are tried.

Whether a family can be split into stages cannot be computed: the check loads torch and compares a tiny copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llmtrain.cluster import Cluster
from llmtrain.errors import MachineError, RecipeError
from llmtrain.launch.disks import disk_problems
from llmtrain.plan import Plan
from llmtrain.plan.installed import check_runnable
from llmtrain.plan.model_facts import model_facts
from llmtrain.recipe import Recipe
from llmtrain.rules import resolve
from llmtrain.search.cheapest import cheapest_ways
from llmtrain.search.enumerate import NamedPlan, RefusedPlan
from llmtrain.search.nearest import nearest_plans
from llmtrain.system.streams import plain_console, quiet_libraries

WITHOUT_PIPELINE = {"parallel.pipeline": 1}


@contextmanager
def suggesting(recipe: Recipe, cluster: Cluster, forced: dict[str, int] | None = None) -> Iterator[None]:
    """Adds the nearest legal plans to a refusal that is raised within the context.

    forced: what every suggestion has to change, if the fault is not one of the rules.
    """
    try:
        yield
    except RecipeError as error:
        _suggest(error, recipe, cluster, forced)
        raise


def _suggest(error: RecipeError, recipe: Recipe, cluster: Cluster, forced: dict[str, int] | None) -> None:
    """Adds the plans nearest to a refused one; if only its memory was refused, the fastest ones that fit."""
    if forced or {problem.rule for problem in error.problems} != {"memory.fits"}:
        error.nearest = nearest_plans(recipe, cluster, forced)
        return
    if ways := cheapest_ways(recipe, cluster, model_facts(recipe.model, recipe.vocab_size)):
        error.nearest = tuple(way.arguments for way in ways)
        error.nearest_figures = tuple(way.figures for way in ways)
    else:
        error.nearest = nearest_plans(recipe, cluster)
    error.nearest_title = "cheapest ways to make it fit, with the same global batch"


def runnable_plan(recipe: Recipe, cluster: Cluster, workers: int | None = None) -> Plan:
    """Returns the plan of a recipe that can be started here; `workers` as in `check_runnable`.

    Raises RecipeError with all faults, and the nearest legal plans.
    """
    with suggesting(recipe, cluster):
        plan = resolve(recipe, cluster)
        check_runnable(plan, workers)
    return plan


def check_machine(plan: Plan) -> None:
    """Raises MachineError with what a plan needs of each machine and this one lacks."""
    if problems := disk_problems(plan):
        raise MachineError(problems)


def check_stages(plan: Plan) -> None:
    """Tries what the plan makes of the model on tiny copies: its adapters, and its stages.

    Raises RecipeError if one of them fails; loads torch.
    """
    if plan.recipe.model.is_frozen_in_part:
        with quiet_libraries():
            from llmtrain.models import check_trained

            check_trained(plan.recipe)
    if plan.parallel.pipeline == 1:
        return
    from llmtrain.models import find_stages

    text = f"comparing a tiny copy of the model in {plan.parallel.stages} stages with the whole model"
    with (
        suggesting(plan.recipe, plan.cluster, WITHOUT_PIPELINE),
        plain_console(stderr=True).status(text),
    ):
        find_stages(plan.recipe, plan.parallel.stages, plan.parallel.tensor)


def without_uncut(
    plans: Sequence[NamedPlan], refused: Sequence[RefusedPlan]
) -> tuple[list[NamedPlan], list[RefusedPlan]]:
    """Moves pipelines to the refused plans if their model cannot be split into their stages.

    Raises RecipeError if no plan is left.
    """
    faults: dict[tuple[int, int], RecipeError | None] = {}
    kept, out = [], list(refused)
    for one in plans:
        stages = (one.plan.parallel.stages, one.plan.parallel.tensor)
        if stages not in faults:
            try:
                check_stages(one.plan)
                faults[stages] = None
            except RecipeError as error:
                faults[stages] = error
        fault = faults[stages]
        if fault is None:
            kept.append(one)
        else:
            out.append(RefusedPlan(one.name, fault.problems[0]))
    if plans and not kept:
        raise RecipeError(dict.fromkeys(fault.problems[0] for fault in faults.values() if fault))
    return kept, out
