"""Whether a legal plan can be started here: with the packages and the processes that are there."""

from __future__ import annotations

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.installed import missing_packages
from llmtrain.plan.plan import Plan


def check_runnable(plan: Plan, workers: int | None = None) -> None:
    """Raises RecipeError where a package of the plan's backend is missing, or a launcher has started other workers.

    workers: how many processes a launcher has started; None where ours will start those of the plan.
    """
    problems = missing_packages(plan)
    if workers is not None and workers != plan.workers:
        backend = plan.recipe.parallel.backend
        message = f"the launcher started {workers} processes, but '{backend}' drives all devices from {plan.workers}"
        problems.append(Problem("launch.workers", "parallel.backend", message, "start it with `llmtrain train`"))
    if problems:
        raise RecipeError(problems)
