"""Loads recipes by path: `recipes/NAME.py` or `recipes/NAME.py:VARIANT`, imported and called.

A recipe is a program of the user: whatever goes wrong in it becomes one message and an exit code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import ValidationError

from llmtrain.cluster import Cluster
from llmtrain.errors import Problem, RecipeError, nearest, reason, short
from llmtrain.plan.vocabulary import grown
from llmtrain.recipe import Recipe, parse_assignments, recipe_problems

_running: list[Path] = []


def is_running() -> bool:
    """Whether a recipe is being read at the moment."""
    return bool(_running)


@contextlib.contextmanager
def users_program(path: Path, what: str, prefix: str = "") -> Iterator[None]:
    """Turns whatever the recipe at `path` raises into a RecipeError, SystemExit and closed streams included.

    what: the action that fails. prefix: of the fields that it declares. An interruption by a signal remains one.
    """
    _running.append(path)
    try:
        with _handled_interruptions():
            yield from _reported(path, what, prefix)
    finally:
        _running.pop()


def _reported(path: Path, what: str, prefix: str) -> Iterator[None]:
    try:
        with _open_streams(path):
            yield
    except RecipeError:
        raise
    except ValidationError as error:
        problems = recipe_problems(error)
        raise RecipeError(Problem(p.rule, prefix + p.field, p.message, p.fix) for p in problems) from None
    except BaseException as error:
        if _is_of_a_signal(error):
            raise
        message = f"{what}{_where(error, path)}: {type(error).__name__}: {reason(error)}"
        raise RecipeError(Problem("recipe.import", str(path), message)) from None


def _is_of_a_signal(error: BaseException) -> bool:
    """Whether the handler of a signal raised an error, instead of the recipe."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


@contextlib.contextmanager
def _handled_interruptions() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt as usual, but from a handler with a frame, unlike a recipe's own."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _open_streams(path: Path) -> Iterator[None]:
    """Refuses a recipe that closes standard output or error, which are needed to report it; reopens both."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr") if _is_open(getattr(sys, name))}
    try:
        yield
    finally:
        closed = [name for name, stream in before.items() if not _is_open(stream)]
        for number, name in enumerate(("stdout", "stderr"), 1):
            if name in closed:
                setattr(sys, name, _opened(number))
    if closed:
        message = f"closed {' and '.join(f'sys.{name}' for name in closed)}, which the command still writes to"
        raise RecipeError(Problem("recipe.streams", str(path), message, "leave them open"))


def _is_open(stream: object) -> bool:
    """Whether a stream can be written to; a stream without a descriptor, as in tests, cannot be closed."""
    if not isinstance(stream, io.TextIOBase) or stream.closed:
        return False
    try:
        os.fstat(stream.fileno())
    except io.UnsupportedOperation:
        return True
    except OSError:
        return False
    return True


def _opened(number: int) -> io.TextIOBase | None:
    """Returns a stream on descriptor 1 or 2, or none if the descriptor was closed, too."""
    try:
        return open(number, "w", errors="backslashreplace", closefd=False)
    except OSError:
        return None


def _where(error: BaseException, path: Path) -> str:
    """Returns the user's line: the last frame of the traceback in the recipe file."""
    own = str(path.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    if isinstance(error, SyntaxError) and error.filename == own:
        lines = [error.lineno]
    return f" (line {lines[-1]})" if lines and lines[-1] else ""


T = TypeVar("T")


def load_recipe(spec: str, assignments: list[str]) -> tuple[Recipe, Cluster | None]:
    """Returns the recipe of `PATH[:VARIANT]` with `--set` assignments applied, and the cluster that it was written for.

    A module's function `recipe` is the base and `recipe_VARIANT` a variant; `cluster` and `cluster_VARIANT` are
    optional and return the cluster. Raises RecipeError for a wrong file, import, variant, recipe or assignment, and as
    `grown` does.
    """
    path, _, variant = spec.partition(":")
    module = import_recipe(Path(path))
    recipe, cluster = recipe_of(module, variant), cluster_of(module, variant)
    fields = parse_assignments(assignments)
    recipe = recipe.with_(**fields) if fields else recipe
    _check_length(recipe)
    return grown(recipe), cluster


def _check_length(recipe: Recipe) -> None:
    """Raises RecipeError for two lengths, or shares of sources beside epochs.

    Checked here, since the recipe of a started run has the steps that its epochs take.
    """
    if recipe.train.epochs is None:
        return
    problems = []
    if recipe.train.max_steps is not None:
        message = f"{recipe.train.max_steps} is not possible beside epochs={recipe.train.epochs}, which decides it"
        fix = "--set train.max_steps=null, or --set train.epochs=null"
        problems.append(Problem("recipe.length", "train.max_steps", message, fix))
    for number, source in enumerate(recipe.data.sources):
        if source.weight != 1:
            message = f"{source.weight} has no effect, since an epoch reads every sequence of '{source.name}' once"
            fix = f"--set data.sources.{number}.weight=1, or train.max_steps instead of train.epochs"
            problems.append(Problem("recipe.length", f"data.sources.{number}.weight", message, fix))
    if problems:
        raise RecipeError(problems)


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
