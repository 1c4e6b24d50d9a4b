"""`llmtrain doctor`: checks this machine or the hosts of a hostfile, or tests this machine's devices."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.options import JsonOption, SetOption
from llmtrain.errors import Exit, Problem, RecipeError, UserError
from llmtrain.system.host import MAX_WORKERS
from llmtrain.system.streams import print_as_is

if TYPE_CHECKING:
    from llmtrain.launch.doctor.run import DoctorOptions


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """The options of the command line."""

    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE[:VARIANT]", help="With --prebuild: the recipe to build for.")
    ] = None
    assignments: SetOption = field(default_factory=list)
    hostfile: Annotated[
        Path | None, typer.Option(help="Check these hosts over ssh; the file has lines of the form HOST slots=N.")
    ] = None
    include: Annotated[str, typer.Option(help="Hosts and devices to check, such as h1@h2:0,2.")] = ""
    exclude: Annotated[str, typer.Option(help="Hosts and devices to leave out.")] = ""
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks of the all-reduce on this machine; default: one per GPU, or 2 on a CPU.",
            min=1,
            max=MAX_WORKERS,
        ),
    ] = None
    time_limit: Annotated[
        float, typer.Option(help="Abort the all-reduce after this many seconds.", min=1, max=86400)
    ] = 120
    prebuild: Annotated[
        bool, typer.Option("--prebuild", help="Compile the DeepSpeed operators that training would compile.")
    ] = False
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Test this machine's devices for a minute: compare each strategy with plain PyTorch, and measured "
            "rates with the predicted ones. The variable LLMTRAIN_SELF_TEST names the file of the report.",
        ),
    ] = False
    as_json: JsonOption = False


def run_doctor(request: DoctorRequest) -> None:
    """Check this machine, or each host of a hostfile.

    Reports what would make a run fail, and how to fix it.

    Exits with 0 if no fault is found, 5 if there is one, and 2 if the command line is wrong.
    """
    if request.self_test:
        sys.exit(_self_test(request))
    from rich.console import Console

    from llmtrain.launch.doctor.report import show
    from llmtrain.launch.doctor.run import examine_hosts

    try:
        options = _options(request)
        with Console(stderr=True).status("starting") as status:
            report = examine_hosts(options, status.update)
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


def _self_test(request: DoctorRequest) -> int:
    """Tests this machine's devices and prints the result; returns the exit code. Raises RecipeError."""
    from rich.console import Console

    from llmtrain.launch.doctor.report import DoctorReport, show
    from llmtrain.recipe.cluster import local_cluster, self_test_folder
    from llmtrain.trials.self_test.run import self_test

    options = {"RECIPE": request.recipe, "--hostfile": request.hostfile, "--prebuild": request.prebuild}
    if conflicting := [name for name, value in options.items() if value]:
        message = "cannot be combined with --self-test, which tests this machine"
        raise RecipeError([Problem("doctor.options", name, message, "leave it out") for name in conflicting])
    cluster = local_cluster(request.nproc, is_measured=False)
    result = self_test(cluster, self_test_folder(), lambda line: print(line, file=sys.stderr))
    if request.as_json:
        print(result.report.read_text(), end="")
    else:
        console = Console()
        show(DoctorReport([], together=list(result.findings)), console)
        print_as_is(console, [f"report {result.report}"])
    return Exit.WORKER if result.has_fault else Exit.DONE


def _options(request: DoctorRequest) -> DoctorOptions:
    from llmtrain.launch.doctor.run import DoctorOptions
    from llmtrain.launch.hostfile import read_hosts
    from llmtrain.plan.load import load_recipe

    problems = []
    if request.hostfile is None:
        for option, value in (("--include", request.include), ("--exclude", request.exclude)):
            if value:
                problems.append(Problem("doctor.options", option, "needs a hostfile", "add --hostfile"))
    elif request.nproc:
        problems.append(Problem("doctor.options", "--nproc", "is not supported with --hostfile", "set the slots there"))
    if request.recipe and not request.prebuild:
        problems.append(
            Problem("doctor.options", "RECIPE", "is only used with --prebuild", "add --prebuild, or leave it out")
        )
    if request.assignments and not request.recipe:
        problems.append(Problem("doctor.options", "--set", "changes a recipe, but none is given", "name a recipe"))
    if problems:
        raise RecipeError(problems)
    hosts = read_hosts(request.hostfile, request.include, request.exclude) if request.hostfile else []
    recipe = load_recipe(request.recipe, request.assignments)[0] if request.recipe else None
    return DoctorOptions(
        hosts=tuple(hosts),
        nproc=request.nproc,
        seconds=request.time_limit,
        build=request.prebuild,
        parallel=recipe.parallel if recipe else None,
    )
