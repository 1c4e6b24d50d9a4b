"""Which legal plans this version can train, as opposed to plan and render."""

from __future__ import annotations

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.plan import Plan


def check_runnable(plan: Plan) -> None:
    """Raises RecipeError where the plan asks for a kind of parallelism that has no engine here."""
    layout = plan.layout
    # Within pipeline stages tensor parallelism is this package's own.
    degrees = {"tensor": layout.tp if layout.pp == 1 else 1, "sequence": layout.sp, "expert": layout.ep}
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
    if problems:
        raise RecipeError(problems)
