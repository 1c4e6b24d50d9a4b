"""Options that several commands share, and how errors are printed with --json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.commands import completion
from llmtrain.errors import Problem, RecipeError, UserError, did_you_mean

if TYPE_CHECKING:
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
MAX_OPTION = 10**12
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
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]


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


@contextmanager
def errors_as_json(as_json: bool, **fields: Any) -> Iterator[None]:
    """With --json, prints a user's error as JSON data, after `fields`, and exits with its exit code."""
    try:
        yield
    except UserError as error:
        if not as_json:
            raise
        print(json.dumps(fields | error.as_dict(), indent=2))
        sys.exit(error.exit_code)
