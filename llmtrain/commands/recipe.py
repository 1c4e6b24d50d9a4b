"""`llmtrain recipe`: lists and shows recipes; prints the schema of YAML recipes."""

from __future__ import annotations

import ast
import json
from typing import Annotated

import typer

from llmtrain.commands import completion
from llmtrain.commands.options import JsonOption, RecipeArgument, SetOption

app = typer.Typer(help="List recipes, or show a recipe or the schema of recipes.", no_args_is_help=True)


@app.command("list")
def list_recipes() -> None:
    """List the recipes that come with llmtrain, with their variants.

    All commands take these names in place of a file, such as tiny or tiny:zero3.
    """
    from llmtrain.plan.load import shipped_recipes

    for name, file in shipped_recipes().items():
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        print(f"{name:22}{docstring.partition(chr(10))[0]}")
        if variants := completion.variants(file):
            print(f"{'':22}variants: {', '.join(variants)}")


@app.command("show")
def show_recipe(
    recipe: RecipeArgument,
    assignments: SetOption = [],  # noqa: B006  (typer copies it)
    with_defaults: Annotated[bool, typer.Option("--all", help="Also show fields that have their default.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a recipe as YAML, including what it inherits.

    The output includes the cluster, and is itself a recipe.
    """
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.load.yaml_file import as_yaml

    declared, cluster = load_recipe(recipe, assignments)
    if as_json:
        print(declared.model_dump_json(indent=2, exclude_defaults=not with_defaults))
    else:
        print(as_yaml(declared, cluster, with_defaults), end="")


@app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of YAML recipes, for editors.

    Editors complete and check recipes with it.
    """
    from llmtrain.plan.load.yaml_file import recipe_schema

    print(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))
