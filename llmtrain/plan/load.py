"""Loads recipes by path: `recipes/NAME.py` or `recipes/NAME.py:VARIANT`, imported and called."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from llmtrain.cluster import Cluster
from llmtrain.errors import Problem, RecipeError, nearest, reason, short
from llmtrain.plan.users_program import users_program
from llmtrain.recipe import Recipe, parse_assignments

T = TypeVar("T")


def load_recipe(spec: str, assignments: list[str]) -> tuple[Recipe, Cluster | None]:
    """Returns the recipe of `PATH[:VARIANT]` with `--set` assignments applied, and the cluster that it was written for.

    A module's function `recipe` is the base and `recipe_VARIANT` a variant; `cluster` and `cluster_VARIANT` are
    optional and return the cluster. Raises RecipeError for a wrong file, import, variant, recipe or assignment.
    """
    path, _, variant = spec.partition(":")
    module = import_recipe(Path(path))
    recipe, cluster = recipe_of(module, variant), cluster_of(module, variant)
    fields = parse_assignments(assignments)
    return (recipe.with_(**fields) if fields else recipe), cluster


def with_variant(spec: str, variant: str) -> str:
    """Returns `FILE:variant` if a spec names no variant and its file has that one; otherwise the spec unchanged.

    Raises RecipeError for an unreadable file.
    """
    path, colon, _ = spec.partition(":")
    if not colon and variant in variants_of(import_recipe(Path(path))):
        return f"{path}:{variant}"
    return spec


def import_recipe(path: Path) -> ModuleType:
    """Imports the module of a recipe file; its folder is importable meanwhile, as when the file is run."""
    try:
        is_file = path.is_file()
    except (OSError, ValueError) as error:  # a name that is too long, a folder without permission
        raise RecipeError(Problem("recipe.file", short(str(path)), f"cannot be read: {reason(error)}")) from None
    if not is_file:
        raise RecipeError(_no_such_file(path))
    name = f"llmtrain_recipe_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path.resolve())
    if module_spec is None or module_spec.loader is None:
        message = "is not a Python file: a recipe is a module with a function recipe()"
        raise RecipeError(Problem("recipe.file", str(path), message))
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    with users_program(path, "cannot be imported"), _importable(path.parent):
        module_spec.loader.exec_module(module)
    return module


def variants_of(module: ModuleType) -> list[str]:
    """Returns the names of a recipe module's variants, in the order of the file."""
    return [name.removeprefix("recipe_") for name, item in vars(module).items() if _is_variant(name, item)]


def recipe_of(module: ModuleType, variant: str = "") -> Recipe:
    """Returns the recipe of a module, or of one of its variants."""
    path = Path(module.__file__ or module.__name__)
    function = getattr(module, f"recipe_{variant}" if variant else "recipe", None)
    if not callable(function):
        raise RecipeError(_no_such_variant(module, path, variant))
    return _call(function, Recipe, path, "")


def cluster_of(module: ModuleType, variant: str = "") -> Cluster | None:
    """Returns the cluster for which a module's recipe, or a variant of it, was written."""
    function = getattr(module, f"cluster_{variant}", None) if variant else None
    function = function or getattr(module, "cluster", None)
    if not callable(function):
        return None
    return _call(function, Cluster, Path(module.__file__ or module.__name__), "cluster.")


def _is_variant(name: str, item: Any) -> bool:
    return name.startswith("recipe_") and callable(item)


def _call(function: Callable[[], Any], kind: type[T], path: Path, prefix: str) -> T:
    name = getattr(function, "__name__", "recipe")
    with users_program(path, f"failed in {name}()", prefix):
        result = function()
    if not isinstance(result, kind):
        message = f"{name}() returned {type(result).__name__}, not a {kind.__name__}"
        raise RecipeError(Problem("recipe.type", str(path), message))
    return result


def _no_such_file(path: Path) -> Problem:
    if path.is_dir():
        return Problem("recipe.file", str(path), "is a folder, not a recipe", _listing(path))
    if path.exists():
        return Problem("recipe.file", str(path), "is a device, a pipe or a socket, not a regular file")
    folder = path.parent
    if not folder.is_dir():
        return Problem("recipe.file", str(path), f"does not exist: there is no folder '{folder}'")
    known = sorted(file.name for file in folder.glob("*.py"))
    return Problem("recipe.file", str(path), f"does not exist{nearest(path.name, known)}", _listing(folder))


def _listing(folder: Path) -> str:
    known = sorted(file.stem for file in folder.glob("*.py"))[:20]
    return f"recipes in {folder}: {', '.join(known)}" if known else ""


def _no_such_variant(module: ModuleType, path: Path, variant: str) -> Problem:
    known = variants_of(module)
    if not variant:
        return Problem("recipe.function", str(path), "has no function recipe()")
    listing = f"variants: {', '.join(known)}" if known else "it has none"
    return Problem("recipe.variant", str(path), f"has no variant '{variant}'{nearest(variant, known)}", listing)


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Lets a recipe import its neighbours, then unloads them, since another folder may contain the same names."""
    entry, before = str(folder.resolve()), set(sys.modules)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and str(Path(file).parent) == entry:
                del sys.modules[name]
