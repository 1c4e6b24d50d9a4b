"""The last line of a recipe: makes its file a script for python, torchrun, deepspeed and accelerate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from llmtrain.errors import Problem, RecipeError
from llmtrain.recipe import Recipe


def main(recipe: Callable[[], Recipe]) -> None:
    """`llmtrain train` for the file that defines `recipe`, with the script's own arguments.

    Where a launcher started this process it becomes one worker; else it starts them. A variant is
    chosen by `--variant NAME`.
    """
    from llmtrain import cli
    from llmtrain.launch import without_local_rank

    path = Path(sys.modules[recipe.__module__].__file__ or "")
    arguments = without_local_rank(sys.argv[1:])
    spec = str(path)
    if "--variant" in arguments:
        at = arguments.index("--variant")
        if at + 1 == len(arguments):
            raise SystemExit(str(RecipeError(Problem("recipe.variant", "--variant", "needs a name"))))
        spec += f":{arguments[at + 1]}"
        del arguments[at : at + 2]
    cli.main(["train", spec, *arguments])
