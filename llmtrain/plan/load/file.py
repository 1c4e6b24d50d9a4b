"""The interface of all kinds of recipe files, the checks that they share, and the recipes that come with llmtrain."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from llmtrain.errors import Problem, RecipeError, did_you_mean, reason, truncate
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster
from llmtrain.system.untrusted import is_yaml

SUFFIXES = (".py", ".yaml", ".yml")


class RecipeFile(Protocol):
    """A file that declares a recipe and optional variants of it."""

    def variants(self) -> list[str]:
        """Returns the names of the variants, in the order of the file."""

    def recipe(self, variant: str = "") -> Recipe:
        """Returns the recipe or a variant of it. Raises RecipeError if it is missing or invalid."""

    def cluster(self, variant: str = "") -> Cluster | None:
        """Returns the cluster for which the recipe was written, or None. Raises RecipeError if it is invalid."""

    def lines(self, variant: str = "") -> dict[str, str]:
        """Returns dotted field name → file and line, as far as they are known."""


def shipped_recipes() -> dict[str, Path]:
    """Returns name → file of the recipes that come with llmtrain: within the package, or beside it in a checkout."""
    package = Path(__file__).parents[2]
    folder = next((path for path in (package / "recipes", package.parent / "recipes") if path.is_dir()), None)
    return {file.stem: file for file in sorted(folder.glob("*.py"))} if folder else {}


def located(spec: str) -> str:
    """Returns `FILE[:VARIANT]` for `NAME[:VARIANT]` of a recipe that comes with llmtrain; else the spec.

    The suffix of files tells both apart.
    """
    name, colon, variant = spec.partition(":")
    file = shipped_recipes().get(name)
    return f"{file}{colon}{variant}" if file else spec


def check_file(path: Path) -> None:
    """Raises RecipeError unless the path refers to a regular file."""
    try:
        is_file = path.is_file()
    except (OSError, ValueError) as error:  # for example an overlong name, or a folder without permission
        raise RecipeError(Problem("recipe.file", truncate(str(path)), f"cannot be read: {reason(error)}")) from None
    if not is_file:
        raise RecipeError(_no_such_file(path))
    if path.suffix not in SUFFIXES:
        message = "is neither a Python file with a function recipe() nor a YAML file"
        raise RecipeError(Problem("recipe.file", str(path), message))


def check_variant(path: Path, variant: str, known: list[str]) -> None:
    """Raises RecipeError if the file does not define this variant."""
    if variant not in known:
        listing = f"variants: {', '.join(known)}" if known else "it has none"
        function = "" if is_yaml(path.name) else f", which would be the function recipe_{variant}()"
        message = f"has no variant '{variant}'{function}{did_you_mean(variant, known)}"
        raise RecipeError(Problem("recipe.variant", str(path), message, listing))


def _no_such_file(path: Path) -> Problem:
    if path.is_dir():
        return Problem("recipe.file", str(path), "is a folder, not a recipe", _listing(path))
    if os.path.lexists(path):
        return Problem("recipe.file", str(path), "is not a regular file, nor a link to one")
    known, listing = _recipes_in(path.parent), _listing(path.parent)
    if path.name == str(path) and not path.suffix:
        known, listing = [*shipped_recipes()], "llmtrain recipe list shows those that come with llmtrain"
    return Problem("recipe.file", str(path), f"does not exist{did_you_mean(path.name, known)}", listing)


def _recipes_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("*") if file.suffix in SUFFIXES)


def _listing(folder: Path) -> str:
    known = _recipes_in(folder)[:20]
    return f"recipes in {folder}: {', '.join(known)}" if known else ""
