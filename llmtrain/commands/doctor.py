"""`llmtrain doctor`: its command line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import Exit, Problem, RecipeError, UserError

if TYPE_CHECKING:
    from llmtrain.doctor.run import Visit


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """The options of the command line."""

    recipe: str | None
    assignments: list[str]
    hostfile: Path | None
    include: str
    exclude: str
    nproc: int | None
    seconds: float
    build: bool
    as_json: bool


def visit_doctor(request: DoctorRequest) -> None:
    """Checks, prints the report and exits: with 0 if there is no fault, else 5. Raises RecipeError."""
    from rich.console import Console

    from llmtrain.doctor.report import show
    from llmtrain.doctor.run import examine

    try:
        visit = _visit(request)
        with Console(stderr=True).status("starting") as status:
            report = examine(visit, status.update)
    except UserError as error:
        if request.as_json:
            print(json.dumps({"problems": [problem.as_dict() for problem in error.problems]}, indent=2))
            sys.exit(error.exit_code)
        raise
    if request.as_json:
        print(json.dumps(report.document(), indent=2))
    else:
        show(report, Console())
    sys.exit(Exit.WORKER if report.of_level("fault") else Exit.DONE)


def _visit(request: DoctorRequest) -> Visit:
    from llmtrain.doctor.run import Visit
    from llmtrain.launch.hostfile import read_hosts
    from llmtrain.plan.load import load_recipe

    problems = []
    if request.hostfile is None:
        for option, value in (("--include", request.include), ("--exclude", request.exclude)):
            if value:
                problems.append(Problem("doctor.options", option, "needs a hostfile", "add --hostfile"))
    elif request.nproc:
        problems.append(Problem("doctor.options", "--nproc", "is given by the slots of the hostfile", "leave it out"))
    if request.recipe and not request.build:
        problems.append(
            Problem("doctor.options", "RECIPE", "is only used with --prebuild", "add --prebuild, or leave it out")
        )
    if request.assignments and not request.recipe:
        problems.append(Problem("doctor.options", "--set", "changes a recipe, but none is given", "name a recipe"))
    if problems:
        raise RecipeError(problems)
    hosts = read_hosts(request.hostfile, request.include, request.exclude) if request.hostfile else []
    recipe = load_recipe(request.recipe, request.assignments)[0] if request.recipe else None
    return Visit(
        hosts=tuple(hosts),
        nproc=request.nproc,
        seconds=request.seconds,
        build=request.build,
        parallel=recipe.parallel if recipe else None,
    )
