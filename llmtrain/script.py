"""The last line of a recipe, which makes its file a script for python, torchrun, deepspeed and accelerate."""

from __future__ import annotations

import sys
from collections.abc import Callable

from llmtrain.errors import Problem, RecipeError
from llmtrain.recipe import Recipe


def main(recipe: Callable[[], Recipe]) -> None:
    """Runs `llmtrain train` for the file that defines `recipe`, with the script's own arguments.

    If a launcher started this process, it becomes one worker; otherwise it starts them. The function is the file's
    `recipe`, or its `recipe_VARIANT`; the argument `--variant NAME` chooses another variant.
    """
    from llmtrain import cli
    from llmtrain.launch import without_local_rank
    from llmtrain.plan.load import is_running

    if is_running():
        message = "is called while the recipe is imported, so the run would start within itself"
        raise RecipeError(Problem("recipe.main", "main()", message, 'call it under `if __name__ == "__main__":`'))
    try:
        arguments = _arguments(recipe, without_local_rank(sys.argv[1:]))
    except RecipeError as error:
        cli.refuse(error)
    cli.main(arguments)


def _arguments(recipe: Callable[[], Recipe], arguments: list[str]) -> list[str]:
    """Returns the arguments for the command `llmtrain`. Raises RecipeError for a function that it could not find."""
    name = getattr(recipe, "__name__", "")
    module = sys.modules.get(getattr(recipe, "__module__", ""))
    path = getattr(module, "__file__", None)
    if path is None or getattr(module, name, None) is not recipe or name.split("_")[0] != "recipe":
        message = f"main({name or type(recipe).__name__}) was called: a run is read from a file's function recipe() or "
        raise RecipeError(Problem("recipe.main", "main()", f"{message}recipe_VARIANT()", "rename the function"))
    variant = name.removeprefix("recipe").removeprefix("_")
    if "--variant" in arguments:
        at = arguments.index("--variant")
        if at + 1 == len(arguments):
            raise RecipeError(Problem("recipe.variant", "--variant", "needs a name"))
        variant = arguments[at + 1]
        arguments = arguments[:at] + arguments[at + 2 :]
    return ["train", f"{path}:{variant}" if variant else path, *arguments]
