"""Scores a model on downstream tasks with EleutherAI's lm-evaluation-harness, an optional dependency."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from llmtrain.errors import DataError, Problem, RecipeError, UserError, did_you_mean, reason
from llmtrain.models.inference.generate import device_for, load_model
from llmtrain.system.hub import probe_hub
from llmtrain.system.untrusted import UNREADABLE, is_yaml, read_text
from llmtrain.train.tasks import Results


def tasks_of(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Returns the loader of tasks. Raises RecipeError for unknown tasks, and for mistakes in the user's own.

    include_path: folder of further tasks, as YAML files.
    """
    if include_path is not None:
        if not include_path.is_dir():
            raise RecipeError(Problem("tasks.include_path", "--include-path", f"{include_path} is not a folder"))
        with _task_errors_reported(names, include_path):
            manager_of_folder = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(names) <= set(manager_of_folder.all_tasks):
            return manager_of_folder  # without reading the thousands of others
        if broken := _broken_files(include_path):
            raise RecipeError(broken)
    with _task_errors_reported(names, include_path):
        manager = TaskManager(include_path=str(include_path) if include_path else None)
    known = [str(name) for name in manager.all_tasks]
    problems = [
        Problem("tasks.name", "--tasks", f"there is no task '{name}'{did_you_mean(name, known)}", "lm-eval ls tasks")
        for name in names
        if name not in known
    ]
    if problems:
        raise RecipeError(problems)
    return manager


def results_of(
    model: Path,
    names: Sequence[str],
    manager: TaskManager,
    include_path: Path | None,
    limit: int | None,
    batch_size: int,
    trust_remote_code: bool = False,
) -> Results:
    """Returns the results of a model in a Hugging Face folder; on the GPU if it has room there.

    include_path: as for `tasks_of`. limit: largest number of documents of a task. trust_remote_code: whether the
    model's own code may be run. Raises RecipeError for a mistake in the user's own tasks, DataError if a task fails
    otherwise, such as for documents that cannot be loaded, and as `load_model` does.
    """
    tokenizer, loaded = load_model(model, trust_remote_code)
    loaded.tie_weights = lambda: None  # HFLM ties once more, also an embedding and a head that were trained apart
    harness = HFLM(pretrained=loaded.to(device_for(loaded)).eval(), tokenizer=tokenizer, batch_size=batch_size)
    probe_hub()
    with _task_errors_reported(names, include_path):
        evaluated = lm_eval.simple_evaluate(
            harness, tasks=list(names), limit=limit, task_manager=manager, log_samples=False, bootstrap_iters=1000
        )
    return {
        task: {name: _plain(value) for name, value in values.items() if "," in name}
        for task, values in evaluated["results"].items()
    }


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it; the harness writes `N/A` for what is unknown."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


@contextmanager
def _task_errors_reported(names: Sequence[str], folder: Path | None) -> Iterator[None]:
    """Turns whatever a task raises into one error.

    folder: that of the user's own tasks, if any. Raises RecipeError for a mistake in them, with file and line if it is
    in their code, and DataError for anything else, such as documents that cannot be read.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {reason(error)}"
        if folder is None or isinstance(error, OSError):
            fix = "is its dataset in the cache?"
            raise DataError(Problem("tasks.data", ", ".join(names), message, fix)) from error
        frames = traceback.extract_tb(error.__traceback__)
        own_frames = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(folder.resolve())]
        field = (
            f"{own_frames[-1].filename}:{own_frames[-1].lineno}" if own_frames else f"{', '.join(names)} in {folder}"
        )
        raise RecipeError(Problem("tasks.own", field, message, "correct the task")) from error


def _broken_files(folder: Path) -> list[Problem]:
    """Returns a problem for each YAML file that cannot be read; the harness leaves these out."""
    problems = []
    for file in sorted(file for file in folder.rglob("*") if is_yaml(file.name)):
        try:
            yaml.compose(read_text(file), Loader=yaml.SafeLoader)  # without following tags
        except (*UNREADABLE, yaml.YAMLError) as error:
            problems.append(Problem("tasks.yaml", str(file), f"cannot be read: {reason(error)}"))
    return problems
