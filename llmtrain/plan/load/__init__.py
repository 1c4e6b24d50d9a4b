"""Loads recipes by path: `FILE` or `FILE:VARIANT`, where the file is Python or YAML."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from os import PathLike
from pathlib import Path

from llmtrain.errors import Problem, RecipeError, UserError
from llmtrain.plan.facts.vocabulary import with_resized_vocabulary
from llmtrain.plan.load.file import RecipeFile, check_file, located, shipped_recipes
from llmtrain.plan.load.python_file import PythonRecipe, is_running
from llmtrain.recipe import Recipe, parse_assignments
from llmtrain.recipe.cluster import Cluster
from llmtrain.system.untrusted import expanded, is_yaml

__all__ = [
    "PythonRecipe",
    "RecipeFile",
    "declared",
    "is_running",
    "load_recipe",
    "located",
    "open_recipe",
    "shipped_recipes",
    "with_lines",
    "with_variant",
]


_lines: dict[str, str] = {}
"""Field → file and line that set it, for the recipe that was loaded last."""
_loaded: Recipe | None = None
"""The recipe that was loaded last."""


def load_recipe(spec: str, assignments: list[str]) -> tuple[Recipe, Cluster | None]:
    """Returns the recipe of `FILE[:VARIANT]` with `--set` assignments applied, and the cluster that it was written for.

    Raises RecipeError for a wrong file, variant, recipe or assignment, and as `with_resized_vocabulary` does.
    """
    global _loaded
    path, _, variant = spec.partition(":")
    file = open_recipe(Path(path))
    recipe, cluster = file.recipe(variant), file.cluster(variant)
    fields = parse_assignments(assignments)
    _lines.clear()
    _lines.update({name: line for name, line in file.lines(variant).items() if name not in fields})
    recipe = _with_code_dir(recipe.with_(**fields) if fields else recipe, Path(path).absolute().parent)
    _check_length(recipe)
    _loaded = with_resized_vocabulary(recipe)
    return _loaded, cluster


def declared(recipe: Recipe | str | PathLike[str], variant: str = "") -> tuple[Recipe, Cluster | None]:
    """Returns a recipe and the cluster that it was written for, from a recipe's file or name, or from a recipe object.

    variant: as for `with_variant`.
    """
    if not isinstance(recipe, Recipe):
        spec = located(os.fspath(recipe))
        return load_recipe(with_variant(spec, variant) if variant else spec, [])
    if recipe != _loaded:
        _lines.clear()
    recipe = _with_code_dir(recipe, _folder_of_program())
    _check_length(recipe)
    return with_resized_vocabulary(recipe), None


def open_recipe(path: Path, extending: tuple[Path, ...] = ()) -> RecipeFile:
    """Returns the opened recipe file. extending: the files that extend it. Raises RecipeError."""
    check_file(path)
    if not is_yaml(str(path)):
        return PythonRecipe(path)
    from llmtrain.plan.load.yaml_file import YamlRecipe  # loads PyYAML

    return YamlRecipe(path, open_recipe, extending)


def with_lines(error: UserError) -> UserError:
    """Returns the error with the YAML file and line of each problem's field, where these are known."""
    error.problems = tuple(
        replace(problem, field=f"{_lines[problem.field]}: {problem.field}") if problem.field in _lines else problem
        for problem in error.problems
    )
    return error


def with_variant(spec: str, variant: str) -> str:
    """Returns `FILE:variant` if a spec names no variant and the file defines `variant`; otherwise the unchanged spec.

    Raises RecipeError for an unreadable file.
    """
    path, colon, _ = spec.partition(":")
    if not colon and variant in open_recipe(Path(path)).variants():
        return f"{path}:{variant}"
    return spec


def _with_code_dir(recipe: Recipe, folder: Path) -> Recipe:
    """Returns the recipe with the absolute folder of its own code, if it has any. folder: the default."""
    if not recipe.own_objects:
        return recipe
    return recipe.model_copy(update={"code_dir": str((folder / expanded(recipe.code_dir or ".")).resolve())})


def _folder_of_program() -> Path:
    """Returns the folder of the running program, or the working directory of an interactive session."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file).absolute().parent if file else Path.cwd()


def _check_length(recipe: Recipe) -> None:
    """Raises RecipeError if epochs are combined with a number of steps or with weights of sources.

    This is checked on loading, because the recipe of a started run has both epochs and the resulting steps.
    """
    if recipe.train.epochs is None:
        return
    problems = []
    if recipe.train.max_steps is not None:
        message = (
            f"{recipe.train.max_steps} cannot be combined with epochs={recipe.train.epochs}, "
            "which determines the number of steps"
        )
        fix = "--set train.max_steps=null, or --set train.epochs=null"
        problems.append(Problem("recipe.length", "train.max_steps", message, fix))
    for number, source in enumerate(recipe.data.sources):
        if source.weight != 1:
            message = f"{source.weight} has no effect, since an epoch reads every sequence of '{source.name}' once"
            fix = f"--set data.sources.{number}.weight=1, or train.max_steps instead of train.epochs"
            problems.append(Problem("recipe.length", f"data.sources.{number}.weight", message, fix))
    if problems:
        raise RecipeError(problems)
