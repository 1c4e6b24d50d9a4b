"""Recipes in Python files, which are imported and whose functions are called.

Such a file is a program of the user. Any failure in it becomes one message and an exit code.
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
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from llmtrain.errors import Problem, RecipeError, reason
from llmtrain.plan.load.file import check_variant
from llmtrain.recipe import Recipe, recipe_problems
from llmtrain.recipe.cluster import Cluster

_running: list[Path] = []


def is_running() -> bool:
    """Whether a Python recipe is being run at the moment."""
    return bool(_running)


@contextlib.contextmanager
def users_program(path: Path, what: str, prefix: str = "") -> Iterator[None]:
    """Turns any failure of the recipe at `path` into a RecipeError, including SystemExit and closed streams.

    what: description of the failing action. prefix: prefix of the declared fields in messages. Interruptions by signals
    are passed on.
    """
    _running.append(path)
    depth = sys.getrecursionlimit()
    try:
        with _handled_interruptions():
            yield from _reported(path, what, prefix)
    finally:
        _running.pop()
        sys.setrecursionlimit(depth)


def _reported(path: Path, what: str, prefix: str) -> Iterator[None]:
    try:
        with _open_streams(path):
            yield
    except RecipeError:
        raise
    except ValidationError as error:
        problems = recipe_problems(error)
        raise RecipeError(replace(one, field=prefix + one.field) for one in problems) from None
    except BaseException as error:
        if _is_of_a_signal(error):
            raise
        message = f"{what}{_where(error, path)}: {type(error).__name__}: {reason(error)}"
        raise RecipeError(Problem("recipe.import", str(path), message)) from None


def _is_of_a_signal(error: BaseException) -> bool:
    """Whether an error was raised by a signal handler rather than by the recipe."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


@contextlib.contextmanager
def _handled_interruptions() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt from a Python handler.

    Its frame in the traceback distinguishes the interruption from a KeyboardInterrupt that the recipe raises.
    """
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
    """Refuses a recipe that closes standard output or error; reopens these streams, which the report needs."""
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
    """Whether a stream can be written to. The streams of tests have no descriptor that could be closed."""
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
    """Returns a new stream on descriptor 1 or 2, or None if the descriptor was closed as well."""
    try:
        return open(number, "w", errors="backslashreplace", closefd=False)
    except OSError:
        return None


def _where(error: BaseException, path: Path) -> str:
    """Returns the failing line of the recipe file, from the last frame of the traceback that is in it."""
    own = str(path.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    if isinstance(error, SyntaxError) and error.filename == own:
        lines = [error.lineno]
    return f" (line {lines[-1]})" if lines and lines[-1] else ""


T = TypeVar("T")


class PythonRecipe:
    """A module with a function `recipe`, a function `recipe_VARIANT` for each variant, and optionally `cluster` and
    `cluster_VARIANT`."""

    def __init__(self, path: Path) -> None:
        """Imports the module. Meanwhile modules in its folder can be imported, as if the file were run."""
        self.path = path
        name = f"llmtrain_recipe_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path.resolve())
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[name] = self.module
        with users_program(path, "cannot be imported"), _importable(path.parent):
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
        with users_program(self.path, f"failed in {name}()", prefix):
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
