"""Recipes in Python files, which are imported and whose functions are called.

Such a file is a program of the user, which is trusted. An exception in it becomes a message with its line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from llmtrain.errors import Problem, RecipeError, reason
from llmtrain.plan.load.file import check_variant
from llmtrain.recipe import Recipe, recipe_problems
from llmtrain.recipe.cluster import Cluster
from llmtrain.recipe.own_code import RECIPE_MODULE

_running: list[Path] = []


def is_running() -> bool:
    """Whether a Python recipe is being run at the moment."""
    return bool(_running)


@contextlib.contextmanager
def reported_errors(path: Path, action: str, prefix: str = "") -> Iterator[None]:
    """Turns an exception of the recipe at `path`, or SystemExit, into a RecipeError with its line.

    What the recipe prints goes to standard error, since a command may write JSON to standard output. action: what
    fails. prefix: prefix of the declared fields in messages.
    """
    _running.append(path)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except RecipeError:
        raise
    except ValidationError as error:
        problems = recipe_problems(error)
        raise RecipeError(replace(problem, field=prefix + problem.field) for problem in problems) from None
    except (Exception, SystemExit) as error:
        message = f"{action}{_line_of(error, path)}: {type(error).__name__}: {reason(error)}"
        raise RecipeError(Problem("recipe.import", str(path), message)) from None
    finally:
        _running.pop()


def _line_of(error: BaseException, path: Path) -> str:
    """Returns the failing line of the recipe file, from the last frame of the traceback that is in it."""
    file = str(path.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [error.lineno]
    return f" (line {lines[-1]})" if lines and lines[-1] else ""


T = TypeVar("T")


class PythonRecipe:
    """A module with a function `recipe`, a function `recipe_VARIANT` for each variant, and optionally `cluster` and
    `cluster_VARIANT`."""

    def __init__(self, path: Path) -> None:
        """Imports the module. Meanwhile modules in its folder can be imported, as if the file were run."""
        self.path = path
        name = f"{RECIPE_MODULE}{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path.resolve())
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[name] = self.module
        with reported_errors(path, "cannot be imported"), _importable(path.parent):
            spec.loader.exec_module(self.module)

    def variants(self) -> list[str]:
        """Returns the names of the variants, in the order of the file."""
        functions = [name for name, item in vars(self.module).items() if callable(item)]
        return [name.removeprefix("recipe_") for name in functions if name.startswith("recipe_")]

    def recipe(self, variant: str = "") -> Recipe:
        """Returns the recipe or a variant of it. Raises RecipeError."""
        if variant:
            check_variant(self.path, variant, self.variants())
        function = getattr(self.module, f"recipe_{variant}" if variant else "recipe", None)
        if not callable(function):
            raise RecipeError(Problem("recipe.function", str(self.path), "has no function recipe()"))
        return self._call(function, Recipe, "")

    def cluster(self, variant: str = "") -> Cluster | None:
        """Returns the cluster for which the recipe was written, or None. Raises RecipeError."""
        function = getattr(self.module, f"cluster_{variant}", None) if variant else None
        function = function or getattr(self.module, "cluster", None)
        return self._call(function, Cluster, "cluster.") if callable(function) else None

    def lines(self, variant: str = "") -> dict[str, str]:
        """Returns an empty dictionary, because a program has no fixed lines for its fields."""
        return {}

    def _call(self, function: Callable[[], Any], kind: type[T], prefix: str) -> T:
        name = getattr(function, "__name__", "recipe")
        with reported_errors(self.path, f"failed in {name}()", prefix):
            result = function()
        if not isinstance(result, kind):
            message = f"{name}() returned {type(result).__name__}, not a {kind.__name__}"
            raise RecipeError(Problem("recipe.type", str(self.path), message))
        return result


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Lets a recipe import modules of its folder, then unloads them, because other folders may use the same names."""
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
