"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.errors import Problem, RecipeError, nearest

if TYPE_CHECKING:
    from llmtrain.cluster import Cluster

MOST_WORKERS = 1024
"""The largest number of workers on one machine."""
RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE[:VARIANT]", help="Recipe file, recipes/NAME.py.")]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Set a field of the recipe, as in optim.lr=3e-4. Repeatable."),
]
NodesOption = Annotated[int | None, typer.Option(help="Number of machines; default: as in the recipe.", min=1)]
PerNodeOption = Annotated[int | None, typer.Option(help="Number of devices per machine.", min=1)]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="Type of device: a100, h100, h200, b200, mi300x, cpu, or one that the recipe defines."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def named_cluster(written_for: Cluster | None, nodes: int | None, per_node: int | None, device: str | None) -> Cluster:
    """Returns the cluster that the options describe.

    Options that are not given default to the recipe's cluster, then to this machine.
    """
    from pydantic import ValidationError

    from llmtrain.cluster import known_devices, local_cluster
    from llmtrain.recipe import recipe_problems

    base = written_for or local_cluster()
    known = known_devices(base.own_devices)
    if device is not None and device.lower() not in known:
        listing = f"known: {', '.join(known)}"
        raise RecipeError(
            Problem("cluster.device", "--device", f"'{device}' is unknown{nearest(device.lower(), known)}", listing)
        )
    try:
        return base.resized(nodes, per_node, device)
    except ValidationError as error:
        options = {"nodes": "--nodes", "devices_per_node": "--gpus-per-node"}
        raise RecipeError(
            Problem("cluster.size", options.get(problem.field, problem.field), problem.message, "use fewer devices")
            for problem in recipe_problems(error)
        ) from None
