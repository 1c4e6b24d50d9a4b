"""`llmtrain verify`: compares every plan with plain PyTorch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from llmtrain import library
from llmtrain.commands.options import JsonOption, RecipeArgument, SetOption
from llmtrain.errors import Exit
from llmtrain.system.host import MAX_WORKERS
from llmtrain.system.streams import print_as_is


def verify_plans(
    recipe: RecipeArgument,
    assignments: SetOption = [],  # noqa: B006  (typer copies it)
    nproc: Annotated[
        int | None,
        typer.Option(help="Largest number of workers; default: one per GPU, or one on a CPU.", min=1, max=MAX_WORKERS),
    ] = None,
    plans: Annotated[
        str, typer.Option(help="Plans: all, or names and patterns separated by commas, such as dp2-*,dp1-zero3-*.")
    ] = "all",
    steps: Annotated[int, typer.Option(help="Number of optimizer steps of each run.", min=1)] = 10,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory; default: runs/NAME-verify.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that every plan trains the same run as plain PyTorch.

    All plans that this machine can run are checked. Exits with 1 if one deviates or fails.

    Without a variant, the recipe's variant `verify` is used if it exists.
    """
    from rich.console import Console

    from llmtrain.plan.load import load_recipe, with_variant
    from llmtrain.run_dir import default_run_dir
    from llmtrain.trials.verify.table import certificate_lines, certificate_table

    chosen_recipe = with_variant(recipe, "verify")
    if chosen_recipe != recipe:
        print(f"verifying {chosen_recipe}, the variant that the recipe provides for this", file=sys.stderr)
    declared, _ = load_recipe(chosen_recipe, assignments)
    folder = run_dir or default_run_dir(declared, "verify").path
    certificate = library.verify(declared, nproc=nproc, plans=plans, steps=steps, run_dir=folder)
    if as_json:
        print(json.dumps(certificate.document(), indent=2))
    else:
        console = Console()
        console.print(certificate_table(certificate))
        print_as_is(console, (*certificate_lines(certificate), f"certificate {folder / 'certificate.json'}"))
    sys.exit(1 if certificate.deviating else Exit.DONE)
