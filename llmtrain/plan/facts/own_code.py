"""Imports a recipe's own code in a helper process, and identifies its files and versions."""

from __future__ import annotations

import hashlib
import inspect
import math
import platform
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from pydantic import Field

from llmtrain.errors import Problem, RecipeError, UserError, format_value
from llmtrain.plan.facts.helper_process import run_helper
from llmtrain.plan.facts.own_callbacks import callback_problems, tracker_problems
from llmtrain.plan.facts.own_loss import Sizes, check_loss
from llmtrain.recipe import KernelsConfig, ObjectiveConfig, ParallelConfig, Part, Recipe, parse_recipe
from llmtrain.recipe.own_code import import_object, is_path, own_code_errors
from llmtrain.system.durable import write_atomically
from llmtrain.system.host import cache_root, installed_version
from llmtrain.system.untrusted import UNREADABLE, expanded, read_json

_LAYOUT = {"parallel": ParallelConfig(), "kernels": KernelsConfig()}
TRIED_STEPS = 1_000
"""Steps for which a schedule is called before a run."""
CACHE = "own_code"
"""Folder of the cache."""
ROW_FUNCTIONS = frozenset({"reader", "filter", "map"})
"""Fields of a source that name functions of one argument."""


_version = cache(installed_version)
"""A search asks thousands of times; what this process has imported keeps its version."""


class OwnCode(Part):
    """The files and packages that the objects of a recipe come from."""

    files: dict[str, str] = Field(default_factory=dict)
    """File → SHA-256 of its content. Names are relative to the recipe's folder, or absolute."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Installed package → version."""

    def described(self) -> dict[str, str]:
        """Returns the shortened hash of each file and the version of each package, by name."""
        return {**{name: digest[:12] for name, digest in self.files.items()}, **self.packages}


def examined(recipe: Recipe, sizes: Sizes | None = None) -> OwnCode | None:
    """Returns the files and versions of a recipe's own code; None if the recipe names no object.

    sizes: of what a loss is given; if they are unknown, it is imported, but not tried.
    The result is cached until one of the files changes. Raises RecipeError with every object that cannot be imported.
    """
    objects = recipe.own_objects
    if not objects:
        return None
    has_schedule = is_path(recipe.optim.schedule) and recipe.train.max_steps is not None
    tried: dict[str, Any] = {
        # Without the layout, so that the plans of a search share a trial.
        "recipe": recipe.model_copy(update=_LAYOUT).model_dump(mode="json") if has_schedule else None,
        "callbacks": {
            f"callbacks.{number}.object": {"options": one.options, "changes_gradients": one.changes_gradients}
            for number, one in enumerate(recipe.callbacks)
        },
        "loss": None,
    }
    if recipe.objective.is_own and sizes is not None:
        tried["loss"] = {"objective": recipe.objective.model_dump(mode="json"), "sizes": list(sizes)}
    return examined_objects(objects, recipe.code_dir, tried)


def examined_objects(objects: dict[str, str], folder: str | None, tried: dict[str, Any] | None = None) -> OwnCode:
    """Returns the files and versions of objects, dotted field → import path, alone; cached and refused as `examined`.

    folder: that of the recipe's own modules. tried: what is called besides, see `answer`.
    """
    nothing: dict[str, Any] = {"recipe": None, "callbacks": {}, "loss": None}
    request = {"objects": objects, "folder": folder, **(tried or nothing)}
    path = cache_path(request)
    try:
        known = read_json(path, OwnCode)
    except UNREADABLE:
        known = None
    if known is not None and is_current(known, folder):
        return known
    document = run_helper(__name__, request, "the process that imports the recipe's own code")
    code = OwnCode.model_validate(document)
    write_cache(path, code)
    return code


def cache_path(request: dict[str, Any]) -> Path:
    """Returns the file of the cache for a request to a helper process, under the installed versions."""
    versions = [_version(package) for package in ("llmtrain", "torch", "transformers")]
    key = hashlib.sha256(repr([request, versions, platform.python_version(), sys.prefix]).encode()).hexdigest()[:32]
    return expanded(str(cache_root())) / CACHE / f"{key}.json"


def write_cache(path: Path, part: Part) -> None:
    """Writes a result to the cache; a cache that cannot be written is not needed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, part.model_dump_json(indent=1) + "\n")
    except OSError:
        pass


def is_current(code: OwnCode, folder: str | None) -> bool:
    """Whether files and packages are still those that were found."""
    return all(_digest(Path(folder or "/", name)) == digest for name, digest in code.files.items()) and all(
        _version(package) == version for package, version in code.packages.items()
    )


def changed_files(code: OwnCode, folder: str | None) -> list[str]:
    """Returns the files that this machine does not have with the same content."""
    return [name for name, digest in code.files.items() if _digest(Path(folder or "/", name)) != digest]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Imports the objects of a request, and returns the fields of their `OwnCode`. Raises RecipeError."""
    folder = request["folder"]
    problems: list[Problem] = []
    for field, path in request["objects"].items():
        try:
            found = import_object(path, folder, field)
            if field.startswith("callbacks."):
                problems += callback_problems(field, path, found, **request["callbacks"][field])
            elif field.startswith("logging.trackers."):
                problems += tracker_problems(field, path, found)
            elif not callable(found):
                message = f"{path} is {type(found).__name__}, which is neither a function nor a class"
                problems.append(Problem("code.kind", field, message))
            elif field.rpartition(".")[2] in ROW_FUNCTIONS:
                check_takes_one(found, path, field)
        except UserError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    if request["recipe"]:
        check_schedule(parse_recipe(request["recipe"]))
    if tried := request["loss"]:
        check_loss(ObjectiveConfig.model_validate(tried["objective"]), folder, Sizes(*tried["sizes"]))
    roots = {path.partition(":")[0].partition(".")[0] for path in request["objects"].values()}
    return identified(roots, folder).model_dump()


def check_takes_one(function: Any, path: str, field: str) -> None:
    """Raises RecipeError if a function cannot be called with one argument."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        message = f"{path}{inspect.signature(function)} cannot be called with one argument: {error}"
        raise RecipeError(Problem("code.arguments", field, message)) from None
    except ValueError:  # a function of C without a signature
        pass


def check_schedule(recipe: Recipe) -> None:
    """Calls a user's own schedule for steps of the whole run. Raises RecipeError if a learning rate is not one."""
    path, folder, steps, field = recipe.optim.schedule, recipe.code_dir, recipe.train.steps, "optim.schedule"
    factor = import_object(path, folder, field)
    for step in range(0, steps, max(1, steps // TRIED_STEPS)):
        with own_code_errors(path, folder, field, f"fails for step {step}"):
            value = factor(step, recipe)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            message = f"{path} returns {format_value(value)} for step {step}, which is not a number of at least 0"
            raise RecipeError(Problem("code.schedule", field, message))


def identified(roots: set[str], folder: str | None) -> OwnCode:
    """Returns the files and versions of the loaded modules that are in a folder or in packages of these names."""
    files, packages = {}, {}
    distributions = packages_distributions()
    for name, file in _loaded_files():
        root = name.partition(".")[0]
        is_installed = "site-packages" in file.parts or "dist-packages" in file.parts
        is_own = folder is not None and file.is_relative_to(folder) and not is_installed
        if root == "llmtrain" or root in sys.stdlib_module_names or not (is_own or root in roots):
            continue
        if is_installed:
            for package in distributions.get(root, ()):
                packages[package] = _version(package) or ""
        else:
            key = str(file.relative_to(str(folder))) if is_own else str(file)
            files[key] = _digest(file) or ""
    return OwnCode(files=dict(sorted(files.items())), packages=dict(sorted(packages.items())))


def _loaded_files() -> Iterator[tuple[str, Path]]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # torch.classes has the name of a file that does not exist.
        if isinstance(file, str) and name != "__main__" and Path(file).is_absolute():
            yield name, Path(file).resolve()


def _digest(file: Path) -> str | None:
    """Returns the SHA-256 of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None
