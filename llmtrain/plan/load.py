"""Recipes by path: `recipes/NAME.py` or `recipes/NAME.py:VARIANT`, imported and called."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import ValidationError

from llmtrain.cluster import Cluster
from llmtrain.errors import Problem, RecipeError, nearest
from llmtrain.recipe import Recipe, parse_assignments, recipe_problems

T = TypeVar("T")


def load_recipe(spec: str, assignments: list[str]) -> tuple[Recipe, Cluster | None]:
    """The recipe of `PATH[:VARIANT]` with `--set` assignments applied, and the cluster it was written for.

    A module's function `recipe` is the base and `recipe_VARIANT` a variant; `cluster` and
    `cluster_VARIANT` are optional and say which cluster. Raises RecipeError for a file, import,
    variant, recipe or assignment that is wrong.
    """
    path, _, variant = spec.partition(":")
    module = import_recipe(Path(path))
    recipe, cluster = recipe_of(module, variant), cluster_of(module, variant)
    fields = parse_assignments(assignments)
    return (recipe.with_(**fields) if fields else recipe), cluster


def with_variant(spec: str, variant: str) -> str:
    """`FILE:variant` where a spec names no variant and its file has that one; else the spec as it is.

    Raises RecipeError for a file that cannot be read.
    """
    path, colon, _ = spec.partition(":")
    if not colon and variant in variants_of(import_recipe(Path(path))):
        return f"{path}:{variant}"
    return spec


def import_recipe(path: Path) -> ModuleType:
    """The module of a recipe file; its folder is importable meanwhile, as when the file is run."""
    if not path.is_file():
        raise RecipeError(_no_such_file(path))
    name = f"llmtrain_recipe_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path.resolve())
    if module_spec is None or module_spec.loader is None:
        message = "is not a Python file: a recipe is a module with a function recipe()"
        raise RecipeError(Problem("recipe.file", str(path), message))
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        with _importable(path.parent):
            module_spec.loader.exec_module(module)
    except Exception as error:  # a recipe is the user's program: whatever it raises is told with its line
        raise _failed(error, path, "does not import") from None
    return module


def variants_of(module: ModuleType) -> list[str]:
    """Names of a recipe module's variants, in the order of the file."""
    return [name.removeprefix("recipe_") for name, item in vars(module).items() if _is_variant(name, item)]


def recipe_of(module: ModuleType, variant: str = "") -> Recipe:
    """The recipe of a module, or of one of its variants."""
    path = Path(module.__file__ or module.__name__)
    function = getattr(module, f"recipe_{variant}" if variant else "recipe", None)
    if not callable(function):
        raise RecipeError(_no_such_variant(module, path, variant))
    return _call(function, Recipe, path, "")


def cluster_of(module: ModuleType, variant: str = "") -> Cluster | None:
    """The cluster that a module says its recipe, or variant, was written for."""
    function = getattr(module, f"cluster_{variant}", None) if variant else None
    function = function or getattr(module, "cluster", None)
    if not callable(function):
        return None
    return _call(function, Cluster, Path(module.__file__ or module.__name__), "cluster.")


def _is_variant(name: str, item: Any) -> bool:
    return name.startswith("recipe_") and callable(item)


def _call(function: Callable[[], Any], kind: type[T], path: Path, prefix: str) -> T:
    try:
        result = function()
    except ValidationError as error:
        problems = recipe_problems(error)
        raise RecipeError(Problem(p.rule, prefix + p.field, p.message, p.fix) for p in problems) from None
    except RecipeError:
        raise
    except Exception as error:  # as above: the user's program
        raise _failed(error, path, f"failed in {function.__name__}()") from None
    if not isinstance(result, kind):
        message = f"{function.__name__}() returned {type(result).__name__}, not a {kind.__name__}"
        raise RecipeError(Problem("recipe.type", str(path), message))
    return result


def _failed(error: Exception, path: Path, what: str) -> RecipeError:
    """The user's own line: the last frame of the traceback that lies in the recipe file."""
    if isinstance(error, RecipeError):
        return error
    if isinstance(error, ValidationError):
        return RecipeError(recipe_problems(error))
    own = str(path.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    if isinstance(error, SyntaxError) and error.filename == own:
        lines = [error.lineno]
    where = f" (line {lines[-1]})" if lines and lines[-1] else ""
    message = f"{what}{where}: {type(error).__name__}: {error}"
    return RecipeError(Problem("recipe.import", str(path), message))


def _no_such_file(path: Path) -> Problem:
    if path.is_dir():
        return Problem("recipe.file", str(path), "is a folder, not a recipe", _listing(path))
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
    """Lets a recipe import its neighbours; they are forgotten again, for another folder may hold their namesakes."""
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
