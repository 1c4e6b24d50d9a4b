"""`llmtrain data`: tokenizes and packs a recipe's data before training, shows and verifies it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.options import JsonOption, RecipeArgument, SetOption
from llmtrain.errors import Problem, RecipeError, reason
from llmtrain.system.streams import print_as_is


def prepare_data(
    recipe: RecipeArgument,
    assignments: SetOption = [],  # noqa: B006  (typer copies it)
    show: Annotated[
        int,
        typer.Option(
            metavar="N", help="Show the first N sequences, with the tokens that are trained on.", min=0, max=100_000
        ),
    ] = 0,
    html: Annotated[
        Path | None, typer.Option(help="Write the first N (--show) or 8 sequences to an HTML page.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Compare all prepared data with the hashes that were computed as it was written."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Tokenize and pack a recipe's data before training.

    Prints how many documents, tokens and sequences there are.
    """
    from rich.console import Console

    from llmtrain.data import Progress, data_summary, prepare, report, verify_prepared
    from llmtrain.data.preview import first_sequences, render_html, render_terminal
    from llmtrain.plan.load import load_recipe

    declared, _ = load_recipe(recipe, assignments)
    progress = Progress(Console(stderr=True) if as_json else Console())
    prepared = prepare(declared, progress)
    if verify:
        progress.say(f"{verify_prepared(prepared, progress):,} bytes are as they were written")
    if as_json:
        print(json.dumps(data_summary(prepared, declared), indent=2))
    else:
        console = Console()
        console.print(report(prepared, declared))
        if html:
            page = render_html(first_sequences(prepared, declared, show or 8), prepared, declared)
            try:
                html.write_text(page, "utf-8")
            except OSError as error:
                message = f"cannot write {html}: {reason(error)}"
                raise RecipeError(Problem("data.html", "--html", message, "choose another file")) from None
            print_as_is(console, [f"wrote {html}"])
        elif show:
            has_colors = console.color_system is not None and not console.no_color
            console.print(render_terminal(first_sequences(prepared, declared, show), has_colors))
