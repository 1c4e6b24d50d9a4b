"""`llmtrain plan`: prints or writes a resolved plan, or prints the fastest plans."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmtrain import library
from llmtrain.commands.options import (
    DeviceOption,
    JsonOption,
    NodesOption,
    PerNodeOption,
    RecipeArgument,
    SetOption,
    errors_as_json,
    named_cluster,
)
from llmtrain.errors import Problem, RecipeError, printable, reason, truncate
from llmtrain.system.streams import print_as_is

if TYPE_CHECKING:
    from llmtrain.recipe import Recipe
    from llmtrain.recipe.cluster import Cluster


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
    program: Annotated[
        Literal["trainer", "accelerate"] | None,
        typer.Option(
            "--as",
            help="Print the plan as TrainingArguments in JSON, or as Accelerate's YAML; what these cannot express goes "
            "to standard error.",
        ),
    ] = None
    write: Annotated[
        Path | None,
        typer.Option(help="Write plan.json, ds_config.json and diagrams of memory and schedule to this folder."),
    ] = None


def show_plan(request: PlanRequest) -> None:
    """Show the plan of a recipe on a cluster, or why it is refused.

    Prints parallel degrees, batch, memory and predicted time. --json and --write also give the DeepSpeed configuration.
    """
    from llmtrain.plan.load import load_recipe

    with errors_as_json(request.as_json):
        declared, written_for = load_recipe(request.recipe, request.assignments)
        cluster = named_cluster(written_for, request.nodes, request.gpus_per_node, request.device)
        if request.program and (request.search or request.write):
            other = "--search" if request.search else "--write"
            message = f"prints one plan, and is not supported with {other}"
            raise RecipeError(Problem("plan.as", "--as", message, "leave one of them out"))
        if request.search:
            _search(declared, cluster, request)
            return
        planned = library.plan(declared, cluster, trace=request.trace)
    if request.program:
        _show_as(request.program, planned, request.as_json)
    else:
        _show(planned, request)


def _show_as(program: str, planned: library.Planned, as_json: bool) -> None:
    """Prints a plan as the settings of another program, and what these do not express."""
    from llmtrain.plan.migrate.back import RENDERERS
    from llmtrain.plan.migrate.translation import joined

    rendered = RENDERERS[program](planned.plan)
    if as_json:
        lines = [{"field": line.key, "value": line.value, "reason": line.text} for line in rendered.lines]
        print(json.dumps({"settings": rendered.settings, "not_expressed": lines}, indent=2))
        return
    if program == "accelerate":
        import yaml

        print(yaml.safe_dump(rendered.settings, sort_keys=False), end="")  # YAML 1.1, as Accelerate reads it
    else:
        print(json.dumps(rendered.settings, indent=2))
    sys.stdout.flush()
    if rendered.lines:
        print(f"not expressed ({len(rendered.lines)})", file=sys.stderr)
    for line in joined(rendered.lines):
        print(f"  {printable(str(line))}", file=sys.stderr)


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
