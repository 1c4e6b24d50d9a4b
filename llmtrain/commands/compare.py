"""`llmtrain compare`: shows what differs between two runs, from their directories alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import JsonOption


def compare_runs(
    a: Annotated[Path, typer.Argument(metavar="A", help="Run directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Run directory to compare it with.")],
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two runs, in the terminal.

    Compares their recipes, data, plans, environments and metrics.
    """
    from rich.console import Console

    from llmtrain.report import read_run
    from llmtrain.report.differences import compared_metrics, differences
    from llmtrain.report.page import names_of
    from llmtrain.report.terminal import comparison

    runs = [read_run(path) for path in (a, b)]
    groups, metrics = differences(runs), compared_metrics(*runs)
    if as_json:
        document = {
            "runs": [str(run.path) for run in runs],
            "differences": {
                group: {difference.field: difference.values for difference in found} for group, found in groups.items()
            },
            "metrics": {label: values for label, values, _ in metrics},
        }
        print(json.dumps(document, indent=2))
    else:
        rows = [(label, texts) for label, _, texts in metrics]
        Console(highlight=False).print(comparison(names_of(runs), groups, rows))
