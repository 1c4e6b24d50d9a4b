"""`llmtrain plan`: prints or writes a resolved plan, or prints the fastest plans. Other commands share its options."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain import library
from llmtrain.commands import completion
from llmtrain.errors import Problem, RecipeError, did_you_mean, reason, truncate
from llmtrain.system.streams import print_as_is

if TYPE_CHECKING:
    from llmtrain.recipe import Recipe
    from llmtrain.recipe.cluster import Cluster


def _located(spec: str) -> str:
    from llmtrain.plan.load import located

    return located(spec)


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE[:VARIANT]",
        help="Recipe file, NAME.py or NAME.yaml, or the name of a recipe that `llmtrain recipe list` shows.",
        autocompletion=completion.recipes,
        callback=_located,
    ),
]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a field of the recipe, as in optim.lr=3e-4. Repeatable.",
        autocompletion=completion.assignments,
    ),
]
LARGEST_OPTION = 10**12
"""Upper bound of numbers on the command line, as of those of a recipe."""
NodesOption = Annotated[int | None, typer.Option(help="Number of machines; default: as in the recipe.", min=1)]
PerNodeOption = Annotated[int | None, typer.Option(help="Number of devices per machine.", min=1)]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="Type of device: a100, h100, h200, b200, mi300x, cpu, or one that the recipe defines."),
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model. Inspect it first.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def named_cluster(written_for: Cluster | None, nodes: int | None, per_node: int | None, device: str | None) -> Cluster:
    """Returns the cluster that the options describe.

    Missing options are taken from the recipe's cluster if it has one, otherwise from this machine.
    """
    from pydantic import ValidationError

    from llmtrain.recipe import recipe_problems
    from llmtrain.recipe.cluster import known_devices, local_cluster

    base = written_for or local_cluster()
    known = known_devices(base.own_devices)
    if device is not None and device.lower() not in known:
        listing = f"known: {', '.join(known)}"
        raise RecipeError(
            Problem(
                "cluster.device", "--device", f"'{device}' is unknown{did_you_mean(device.lower(), known)}", listing
            )
        )
    try:
        return base.resized(nodes, per_node, device)
    except ValidationError as error:
        options = {"nodes": "--nodes", "devices_per_node": "--gpus-per-node"}
        raise RecipeError(
            Problem("cluster.size", options.get(problem.field, problem.field), problem.message, "use fewer devices")
            for problem in recipe_problems(error)
        ) from None


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of the command line."""

    recipe: RecipeArgument
    assignments: SetOption = field(default_factory=list)
    nodes: NodesOption = None
    gpus_per_node: PerNodeOption = None
    device: DeviceOption = None
    search: Annotated[bool, typer.Option("--search", help="Rank all legal plans by predicted speed.")] = False
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Compute activations by tracing the model, instead of estimating them (loads torch)."
        ),
    ] = False
    as_json: JsonOption = False
    write: Annotated[
        Path | None,
        typer.Option(help="Write plan.json, ds_config.json and diagrams of memory and schedule to this folder."),
    ] = None


def show_plan(request: PlanRequest) -> None:
    """Show the plan of a recipe on a cluster, or why it is refused.

    Prints parallel degrees, batch, memory and predicted time. --json and --write also give the DeepSpeed configuration.
    """
    from llmtrain.plan.load import load_recipe

    try:
        declared, written_for = load_recipe(request.recipe, request.assignments)
        cluster = named_cluster(written_for, request.nodes, request.gpus_per_node, request.device)
        if request.search:
            _search(declared, cluster, request)
            return
        planned = library.plan(declared, cluster, trace=request.trace)
    except RecipeError as error:
        if request.as_json:
            print(json.dumps(error.as_dict(), indent=2))
            sys.exit(error.exit_code)
        raise
    _show(planned, request)


def _show(planned: library.Planned, request: PlanRequest) -> None:
    from rich.console import Console

    written: list[str] = []
    if request.write:
        try:
            written = _write(request.write, planned)
        except OSError as error:
            message = f"{truncate(str(request.write))} cannot be written: {reason(error)}"
            raise RecipeError(Problem("plan.write", "--write", message, "name a folder")) from None
    if request.as_json:
        print(json.dumps(planned.document(), indent=2))
    else:
        print_as_is(Console(), planned.lines())
    if written:
        print(f"wrote {', '.join(written)} to {request.write}", file=sys.stderr if request.as_json else None)


def _write(folder: Path, planned: library.Planned) -> list[str]:
    """Writes the plan, its configurations for DeepSpeed and accelerate, and diagrams of memory and schedule.

    Returns the names of the written files.
    """
    from llmtrain.launch.jobs.accelerate import has_configuration, render_configuration
    from llmtrain.plan.predict.picture import memory_svg, schedule_svg
    from llmtrain.plan.schedules import PipelineSchedule

    plan = planned.plan
    files = {"plan.json": plan.model_dump_json(indent=2) + "\n"}
    if planned.ds_config:
        files["ds_config.json"] = json.dumps(planned.ds_config, indent=2) + "\n"
    if has_configuration(plan):
        files["accelerate.yaml"] = render_configuration(plan, (folder / "ds_config.json").absolute())
    if planned.memory:
        files["memory.svg"] = memory_svg(planned.memory)
    if plan.stages:
        files["schedule.svg"] = schedule_svg(PipelineSchedule.of(plan.parallel), plan.batch)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(files)


def _search(declared: Recipe, cluster: Cluster, request: PlanRequest) -> None:
    """Prints the fastest legal plans."""
    from functools import partial

    from llmtrain.plan.predict import MemoryCache, memory_shortage
    from llmtrain.plan.search.search import search_plans
    from llmtrain.plan.search.search_report import document, lines

    if request.write:
        message = "writes a single plan, but --search finds many"
        raise RecipeError(
            Problem("search.write", "--write", message, "choose one, and write it with its --set options")
        )
    result = search_plans(declared, cluster, partial(memory_shortage, cache=MemoryCache()))
    print(json.dumps(document(result), indent=2) if request.as_json else "\n".join(lines(result)))
