"""`llmtrain profile`: asks the ranks of a running job to record some steps."""

from __future__ import annotations

from pathlib import Path

from llmtrain.errors import Problem, RecipeError, shown
from llmtrain.recipe import ProfileConfig
from llmtrain.run_dir import RunDir, write_json


def request_profile(run: Path, steps: int, ranks: str, memory: bool) -> None:
    """Writes the request. Raises RecipeError for what is no run, and for other ranks than the run has."""
    folder = RunDir(run)
    if not folder.plan_file.is_file():
        raise RecipeError(Problem("profile.run", str(run), "is not a run directory: it has no plan.json"))
    plan = folder.read_plan()
    try:
        numbers = tuple(int(one) for one in ranks.split(","))
    except ValueError:
        message = f"{shown(ranks)} is not a list of numbers"
        raise RecipeError(Problem("profile.ranks", "--ranks", message, "--ranks 0,1")) from None
    if others := [one for one in numbers if not 0 <= one < plan.workers]:
        message = f"the run has no rank {', '.join(map(str, others))}"
        raise RecipeError(Problem("profile.ranks", "--ranks", message, f"its ranks are 0 to {plan.workers - 1}"))
    folder.profile.mkdir(exist_ok=True)
    write_json(folder.profile_request, ProfileConfig(steps=steps, ranks=numbers, memory=memory).model_dump(mode="json"))
    every = plan.recipe.logging.every_steps
    print(f"recording begins after the next step that is logged (every {every}), and is written to {folder.profile}")
