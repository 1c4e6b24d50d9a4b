"""`llmtrain import`: translates the settings of another program into a recipe."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.options import JsonOption, errors_as_json
from llmtrain.errors import Problem, RecipeError, reason

if TYPE_CHECKING:
    from llmtrain.plan.migrate.translation import Kind, Translation

TITLES: dict[Kind, tuple[str, str]] = {
    "same": ("taken over", "green"),
    "different": ("different here", "yellow"),
    "unsupported": ("not supported", "red"),
    "missing": ("to fill in", "magenta"),
}
"""Heading and colour of each list."""
DEFAULT = Path("recipe.yaml")
"""Form and name of a recipe that is printed."""


@dataclass(frozen=True, kw_only=True)
class ImportRequest:
    """The options of the command line."""

    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="Settings of one run: JSON, YAML, TOML, a file with a command line, a Python script, or "
            "training_args.bin; also the files that it names, such as DeepSpeed's JSON or Accelerate's YAML.",
        ),
    ]
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recipe to write, NAME.py or NAME.yaml; default: it is printed, as YAML."),
    ] = None
    devices: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Devices for which the settings were written, to compute the global batch; default: what the files "
            "say, else 1.",
        ),
    ] = None
    program: Annotated[
        str | None,
        typer.Option("--from", metavar="PROGRAM", help="The program of the first file; by default it is recognised."),
    ] = None
    as_json: JsonOption = False


def import_settings(request: ImportRequest) -> None:
    """Translate the settings of another program into a recipe.

    Lists what was taken over, what is different here, what is not supported, and what is left to fill in. Without
    --out, the recipe is printed, and the lists are written to standard error.
    """
    from llmtrain.plan.load.write import nested, recipe_text
    from llmtrain.plan.migrate.programs import translate

    with errors_as_json(request.as_json):
        if request.out and request.out.suffix not in (".py", ".yaml", ".yml"):
            raise RecipeError(Problem("import.out", str(request.out), "must end in .py, .yaml, .yml"))
        translation = translate(request.files, request.devices, request.program)
        translation.check()
        fields = nested(translation.fields)
        heading = f"Translated from {translation.program}: {', '.join(path.name for path in request.files)}."
        text = recipe_text(request.out or DEFAULT, fields, translation.comments, heading)
        if request.out:
            _write(request.out, text)
    if request.as_json:
        lines = [asdict(line) for line in translation.lines]
        print(json.dumps({"program": translation.program, "recipe": fields, "lines": lines}, indent=2))
        return
    if not request.out:
        print(text, end="")
        sys.stdout.flush()
    _show(translation, request.out)


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(Problem("import.out", str(path), "exists", "choose another name")) from None
    except OSError as error:
        raise RecipeError(Problem("import.out", str(path), f"cannot be written: {reason(error)}")) from None


def _show(translation: Translation, out: Path | None) -> None:
    """Prints the lists: to standard error if the recipe is printed. Only a terminal gets columns."""
    import shlex

    from rich.markup import escape
    from rich.table import Table

    from llmtrain.errors import printable
    from llmtrain.plan.migrate.translation import joined
    from llmtrain.system.streams import plain_console, print_as_is

    console = plain_console(stderr=out is None)
    for kind, (title, style) in TITLES.items():
        lines = list(joined(translation.of(kind)))
        if not lines:
            continue
        print_as_is(console, [f"{title} ({len(lines)})"], f"bold {style}")
        if not console.is_terminal:
            print_as_is(console, (f"  {printable(str(line))}" for line in lines))
            continue
        table = Table.grid(padding=(0, 2, 0, 0))
        for line in lines:
            table.add_row(*(escape(printable(part)) for part in (f"  {line.given}".rstrip(), line.became)))
        console.print(table, highlight=False)
    if out:
        print_as_is(console, [f"wrote {out}; its plan: llmtrain plan {shlex.quote(str(out))}"])
