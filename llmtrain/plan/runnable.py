"""Which legal plans this version can train, as opposed to plan and render."""

from __future__ import annotations

from llmtrain.errors import RecipeError
from llmtrain.plan.installed import missing_packages
from llmtrain.plan.plan import Plan


def check_runnable(plan: Plan) -> None:
    """Raises RecipeError where the plan asks for a kind of parallelism that has no engine here."""
    problems = missing_packages(plan)
    if problems:
        raise RecipeError(problems)
