"""Finds the file and the line of a mistake in a user's own tasks for lm-evaluation-harness."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml

from llmtrain.errors import DataError, Problem, RecipeError, UserError, reason
from llmtrain.system.untrusted import UNREADABLE, file_fault, is_yaml, read_text, require_regular_files


@contextmanager
def task_errors_reported(names: Sequence[str], folder: Path | None) -> Iterator[None]:
    """Turns whatever a task raises into one error.

    folder: that of the user's own tasks, whose file and line are named if the mistake is there. Raises RecipeError for
    a mistake in it, and DataError for anything else, such as documents that cannot be read.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {reason(error)}"
        place = _place(error, names, folder) if folder else ""
        if place and not isinstance(error, OSError):
            raise RecipeError(Problem("tasks.own", place, message, "correct the task")) from error
        fix = "is its dataset in the cache?"
        raise DataError(Problem("tasks.data", place or ", ".join(names), message, fix)) from error


def check_files(folder: Path) -> None:
    """Raises RecipeError if a folder of tasks contains what is no file."""
    try:
        for inner in {file.parent for file in _files(folder)}:
            require_regular_files(inner)
    except OSError as error:
        raise RecipeError(Problem("tasks.include_path", str(error.filename or folder), file_fault(error))) from None


def broken_files(folder: Path) -> list[Problem]:
    """Returns a problem for each YAML file that cannot be read; the harness leaves these out."""
    problems = []
    for file in _files(folder):
        try:
            _document(file)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            problems.append(Problem("tasks.yaml", f"{file}:{line}", f"is not YAML: {error.problem}"))
        except (*UNREADABLE, yaml.YAMLError, RecursionError) as error:
            problems.append(Problem("tasks.yaml", str(file), f"cannot be read: {reason(error)}"))
    return problems


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if is_yaml(file.name))


def _document(file: Path) -> yaml.Node | None:
    """Returns the tree of a YAML file, whose tags are not followed."""
    root: yaml.Node | None = yaml.compose(read_text(file), Loader=yaml.SafeLoader)
    return root


def _place(error: Exception, names: Sequence[str], folder: Path) -> str:
    """Returns `FILE:LINE` of a mistake, or only the file, or an empty string if it is not in the user's folder."""
    tasks_folder = folder.resolve()
    if (
        isinstance(error, SyntaxError)
        and error.filename
        and Path(error.filename).resolve().is_relative_to(tasks_folder)
    ):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(tasks_folder)]
    if lines:
        return f"{lines[-1].filename}:{lines[-1].lineno}"
    functions, message = {frame.name for frame in frames}, str(error)
    files = []
    for file in _files(folder):
        entries = _entries(file)
        if entries.get("task", ("", 0))[0] in names:
            files.append(str(file))
            for key, (value, line) in entries.items():
                # Methods of the harness that read a field have its name.
                last = value.rpartition(".")[2]  # of `!function FILE.NAME`
                if key in functions or f"'{key}'" in message or (last and f"'{last}'" in message and key != "task"):
                    return f"{file}:{line}"
    return ", ".join(files)


def _entries(file: Path) -> dict[str, tuple[str, int]]:
    """Returns the fields of a task with their values, if these are scalars, and their lines."""
    try:
        document = _document(file)
    except (*UNREADABLE, yaml.YAMLError, RecursionError):
        return {}
    if not isinstance(document, yaml.MappingNode):
        return {}
    return {
        str(key.value): (str(value.value) if isinstance(value, yaml.ScalarNode) else "", key.start_mark.line + 1)
        for key, value in document.value
    }
