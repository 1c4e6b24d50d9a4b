"""Checks whether a legal plan can be started here, with the installed packages and the started processes."""

from __future__ import annotations

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.installed import missing_packages
from llmtrain.plan.plan import Plan


def check_runnable(plan: Plan, workers: int | None = None) -> None:
    """Raises RecipeError if a package of the plan's backend is missing, or a launcher has started other workers.

    workers: number of processes that a launcher has started; None if llmtrain starts those of the plan itself.
    """
    problems = missing_packages(plan)
    if workers is not None and workers != plan.workers:
        backend = plan.recipe.parallel.backend
        message = f"the launcher started {workers} processes, but '{backend}' drives all devices from {plan.workers}"
        problems.append(Problem("launch.workers", "parallel.backend", message, "start it with `llmtrain train`"))
    if problems:
        raise RecipeError(problems)
