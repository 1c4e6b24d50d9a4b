"""`llmtrain profile`: asks a running job to record steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import MAX_OPTION
from llmtrain.errors import Problem, RecipeError, format_value


def request_profile(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of a job that is running.")],
    steps: Annotated[int, typer.Option(help="Number of steps to record.", min=1, max=MAX_OPTION)] = 3,
    ranks: Annotated[str, typer.Option(help="Ranks to record, separated by commas.")] = "0",
    memory: Annotated[bool, typer.Option("--memory", help="Also write a snapshot of a GPU's memory.")] = False,
) -> None:
    """Record steps of a running job with torch's profiler.

    The recording starts after the next logged step.
    """
    from llmtrain.recipe import ProfileConfig
    from llmtrain.run_dir import RunDir, write_json

    folder = RunDir(run)
    if not folder.plan_file.is_file():
        raise RecipeError(Problem("profile.run", str(run), "is not a run directory: it has no plan.json"))
    plan = folder.read_plan()
    try:
        numbers = tuple(int(rank) for rank in ranks.split(","))
    except ValueError:
        message = f"{format_value(ranks)} is not a list of numbers"
        raise RecipeError(Problem("profile.ranks", "--ranks", message, "--ranks 0,1")) from None
    if missing := [number for number in numbers if not 0 <= number < plan.workers]:
        message = f"the run has no rank {', '.join(map(str, missing))}"
        raise RecipeError(Problem("profile.ranks", "--ranks", message, f"its ranks are 0 to {plan.workers - 1}"))
    folder.profile.mkdir(exist_ok=True)
    write_json(folder.profile_request, ProfileConfig(steps=steps, ranks=numbers, memory=memory).model_dump(mode="json"))
    every = plan.recipe.logging.every_steps
    print(f"recording begins after the next logged step (every {every}) and is written to {folder.profile}")
