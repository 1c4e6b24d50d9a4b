"""Which legal plans this version can train, as opposed to plan and render."""

from __future__ import annotations

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.installed import missing_packages
from llmtrain.plan.plan import Plan


def check_runnable(plan: Plan, workers: int | None = None) -> None:
    """Raises RecipeError where the plan asks for a kind of parallelism that has no engine here, or for other workers.

    workers: how many processes a launcher has started; None where ours will start those of the plan.
    """
    layout = plan.layout
    degrees = {"tensor": layout.tp, "sequence": layout.sp, "expert": layout.ep}
    problems = [
        Problem(
            "engine.degree",
            f"parallel.{name}",
            f"{degree} was given; this version plans and renders {name} parallelism, but trains with 1",
            f"--set parallel.{name}=1",
        )
        for name, degree in degrees.items()
        if degree > 1
    ]
    problems += missing_packages(plan)
    if workers is not None and workers != plan.workers:
        backend = plan.recipe.parallel.backend
        message = f"the launcher started {workers} processes, but '{backend}' drives all devices from {plan.workers}"
        problems.append(Problem("launch.workers", "parallel.backend", message, "start it with `llmtrain train`"))
    if problems:
        raise RecipeError(problems)
