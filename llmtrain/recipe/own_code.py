"""Objects of a user's own code, which a recipe names by their import path: `package.module:name`."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Discriminator, Tag, WithJsonSchema

from llmtrain.errors import Problem, RecipeError, UserError, did_you_mean, reason

RECIPE_MODULE = "llmtrain_recipe_"
"""Prefix of the name under which a recipe file is imported."""
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def import_path(value: Any) -> str:
    """Returns the import path of a function or class, or a path that is given as text.

    Raises ValueError for a text of another form, and for what no other process could import: lambdas, objects that are
    defined within a function, and objects without a name.
    """
    if isinstance(value, str):
        if not _PATH.fullmatch(value):
            raise ValueError("must have the form package.module:name")
        return value
    name = getattr(value, "__qualname__", None)
    if not callable(value) or name is None:
        raise ValueError("must be a function, a class or its import path, package.module:name")
    if "<lambda>" in name or "<locals>" in name:
        what = "a lambda" if name.endswith("<lambda>") else "defined within a function"
        raise ValueError(f"{name}{_place(value)} is {what}; workers import what a module defines at its top level")
    return f"{_module(value, name)}:{name}"


def _module(value: Any, name: str) -> str:
    """Returns the name under which other processes can import the module of an object."""
    module: str = value.__module__
    if module != "__main__" and not module.startswith(RECIPE_MODULE):
        return module
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise ValueError(f"{name} is defined in an interactive session; write it to a file, which workers can import")
    stem = Path(file).stem
    if not stem.isidentifier():
        raise ValueError(
            f"{name} is defined in {file}, which cannot be imported; use letters, digits and _ in its name"
        )
    return stem


def share_program() -> None:
    """Makes the running program importable under its own name, so that what it defines is not defined twice."""
    program = sys.modules["__main__"]
    if file := getattr(program, "__file__", None):
        sys.modules.setdefault(Path(file).stem, program)


def _place(value: Any) -> str:
    line = definition_line(value)
    return f" ({line.removesuffix(': ')})" if line else ""


def definition_line(value: Any) -> str:
    """Returns `FILE, line N: ` for the definition of a function or class; empty if there is no source."""
    try:
        return f"{inspect.getsourcefile(value)}, line {inspect.getsourcelines(value)[1]}: "
    except (OSError, TypeError):
        return ""


NO_FAULTS = ("OutOfMemoryError", "_StopRecomputationError")
"""Exceptions of torch within a user's code that is right: the device is too small, or a checkpoint of activations has
recomputed all that it needs."""


class _Marker:
    """Marks the annotation of a field that holds an import path."""


_SCHEMA = WithJsonSchema({"type": "string", "pattern": "^[^:]+:[^:]+$"})
"""For editors: without the pattern, a name that llmtrain defines would match both branches of a union."""
ObjectPath = Annotated[str, BeforeValidator(import_path), _Marker(), _SCHEMA]
"""A function or class, stored by its import path."""
NAME, PATH = "<name>", "<path>"
NamedPath = Annotated[ObjectPath, Tag(PATH)]
NameOrPath = Discriminator(lambda value: PATH if callable(value) or ":" in str(value) else NAME)
"""Distinguishes, in a union, the names that llmtrain defines (tagged NAME) from an import path (`NamedPath`)."""


def is_path(name: str) -> bool:
    """Whether a value of a field with `NameOrPath` is an import path."""
    return ":" in name


def object_paths(part: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted field and the import path of every object that a part of a recipe names."""
    for name, info in type(part).model_fields.items():
        value, field = getattr(part, name), f"{prefix}{name}"
        marked = _is_marked(info.annotation) or any(isinstance(item, _Marker) for item in info.metadata)
        yield from _paths_in(value, field, marked)


def _paths_in(value: Any, field: str, marked: bool) -> Iterator[tuple[str, str]]:
    if isinstance(value, BaseModel):
        yield from object_paths(value, f"{field}.")
    elif isinstance(value, str) and marked and is_path(value):
        yield field, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _paths_in(item, f"{field}.{key}", marked)
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from _paths_in(item, f"{field}.{number}", marked)


def _is_marked(annotation: Any) -> bool:
    metadata = getattr(annotation, "__metadata__", ())
    arguments = getattr(annotation, "__args__", ())
    return any(isinstance(item, _Marker) for item in metadata) or any(map(_is_marked, arguments))


def import_object(path: str, folder: str | None, field: str = "recipe") -> Any:
    """Returns the object at an import path.

    folder: the folder of the recipe's own modules (`Recipe.code_dir`), which precedes the installed packages. field:
    the dotted field that names the object. Raises RecipeError, with the file and line of the fault in the user's code.
    """
    module_name, _, name = path.partition(":")
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _import_error(path, field, folder, error) from None
        where = f"{folder} and the installed packages" if folder else "the installed packages"
        message = f"{path} cannot be imported: there is no module {error.name} in {where}"
        raise RecipeError(Problem("code.module", field, message)) from None
    except (Exception, SystemExit) as error:
        raise _import_error(path, field, folder, error) from None
    for part in name.split("."):
        if not hasattr(found, part):
            known = [known for known in vars(found) if not known.startswith("_")]
            message = f"{path}: {getattr(found, '__file__', module_name)} defines no {part}{did_you_mean(part, known)}"
            raise RecipeError(Problem("code.name", field, message))
        found = getattr(found, part)
    return found


def _import_error(path: str, field: str, folder: str | None, error: BaseException) -> RecipeError:
    message = f"{path} cannot be imported: {type(error).__name__}: {reason(error)}"
    return RecipeError(Problem("code.import", field, f"{source_line(error, folder)}{message}"))


@contextmanager
def own_code_errors(
    path: str, folder: str | None, field: str, action: str, kind: type[UserError] = RecipeError
) -> Iterator[None]:
    """Raises an error with file and line for an exception that the object at a path raises within the context.

    action: what fails, such as "fails in its forward pass". kind: the class of the error.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ in NO_FAULTS:
            raise
        message = f"{source_line(error, folder)}{path} {action}: {type(error).__name__}: {reason(error)}"
        raise kind(Problem("code.raises", field, message)) from error


def source_line(error: BaseException, folder: str | None) -> str:
    """Returns `FILE, line N: ` for the innermost frame of an error in a folder; empty if it has none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: "
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if folder and _is_within(frame.filename, folder)
    ]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""


def _is_within(file: str, folder: str) -> bool:
    path = Path(file)
    return path.is_relative_to(folder) and "site-packages" not in path.parts
