"""Trackers in addition to `metrics.jsonl`: a user's own, and those of accelerate for TensorBoard, W&B and MLflow."""

from __future__ import annotations

import json
import signal
import sys
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib.util import find_spec
from queue import SimpleQueue
from textwrap import indent
from threading import Thread
from typing import Any

from llmtrain.errors import Problem, RecipeError
from llmtrain.recipe import Recipe
from llmtrain.recipe.own_code import import_object, is_path, own_code_errors, source_line
from llmtrain.run_dir import RunDir, write_json
from llmtrain.system.untrusted import UNREADABLE, read_json

PARAMETER_LENGTH = 250
"""Longest parameter value that every tracker accepts; MLflow drops longer ones."""


def check_trackers(recipe: Recipe) -> None:
    """Raises RecipeError if the package of a chosen tracker is not installed; imports none of them."""
    names = (name for name in recipe.logging.trackers if not is_path(name))
    packages = {name: name if name == "tensorboard" else f"llmtrain[{name}]" for name in names}
    problems = [
        Problem("logging.tracker", "logging.trackers", f"'{name}' is not installed", f"pip install '{package}'")
        for name, package in packages.items()
        if not _installed(name)
    ]
    if problems:
        raise RecipeError(problems)


def _installed(package: str) -> bool:
    spec = find_spec(package)
    # Trackers leave folders with their own name behind, which Python treats as packages without an origin.
    return spec is not None and spec.origin is not None


class Trackers:
    """The trackers of one run, on rank 0. A resumed run continues in each of them.

    They run in a separate thread, since some query a server for each line, and training must not wait. All their work
    is done there: for MLflow, a run belongs to the thread that started it.
    """

    def __init__(self, run_dir: RunDir, recipe: Recipe, start_step: int) -> None:
        """Raises the errors of trackers that cannot start."""
        self._code_dir = recipe.code_dir
        self._calls: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        # Not an executor: at the end of a program, those are closed before the run of a user's own loop is.
        self._thread = Thread(target=self._work, name="trackers", daemon=True)
        self._thread.start()
        self._trackers: dict[str, Any] = {}
        self._submit(lambda: self._begin(run_dir, recipe, start_step)).result()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Sends the numbers among `values`, without waiting; None is left out."""
        numbers = {name: value for name, value in values.items() if value is not None}
        self._submit(lambda: self._log(numbers, step))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Sends a text to the trackers that show texts, without waiting; MLflow's metrics are numbers."""
        self._submit(lambda: self._log_text(name, text, step))

    def close(self) -> None:
        """Sends the rest and ends the run in each tracker."""
        self._submit(lambda: self._each("at its end", lambda _, tracker: tracker.finish()))
        self._calls.put(None)
        self._thread.join()

    def _submit(self, call: Callable[[], None]) -> Future[None]:
        """Makes the thread call a function after those before it."""
        called: Future[None] = Future()
        self._calls.put((called, call))
        return called

    def _work(self) -> None:
        # Signals belong to the main thread: two threads of a stopped rank would handle its dump and its end at once.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while (item := self._calls.get()) is not None:
            called, call = item
            try:
                called.set_result(call())
            except BaseException as error:
                called.set_exception(error)

    def _begin(self, run_dir: RunDir, recipe: Recipe, start_step: int) -> None:
        names = recipe.logging.trackers
        identities = _identities(run_dir) if start_step else {}
        self._trackers = {name: _start(name, run_dir, recipe, start_step, identities) for name in names}
        if start_step == 0:
            for name, tracker in self._trackers.items():
                _store_recipe(name, tracker, recipe)
        if identities:
            write_json(run_dir.trackers_file, identities)

    def _log(self, numbers: Mapping[str, Any], step: int) -> None:
        self._each(f"at step {step:,}", lambda _, tracker: tracker.log(numbers, step=step))

    def _log_text(self, name: str, text: str, step: int) -> None:
        # TensorBoard reads Markdown, in which an indented text is shown as it is.
        shown = {"tensorboard": indent(text, "    ", lambda line: True), "wandb": text}
        self._each(
            f"at step {step:,}",
            lambda tracker, target: tracker in shown and target.log({name: shown[tracker]}, step=step),
        )

    def _each(self, when: str, call: Callable[[str, Any], object]) -> None:
        """Calls a function with the name of each tracker and the tracker. One that fails is disabled."""
        for name, tracker in list(self._trackers.items()):
            try:
                call(name, tracker)
            except Exception as error:  # trackers raise errors of their own kinds; the run matters more than its plots
                del self._trackers[name]
                lost = f"tracker {name} failed {when}, and is disabled from now on: {error!r}"
                where = source_line(error, self._code_dir)
                print(f"{where}{lost}; metrics.jsonl has every line", file=sys.stderr, flush=True)


class _OwnTracker:
    """A tracker of the user's own, with all methods that are called: those that it does not have do nothing."""

    def __init__(self, own: Any) -> None:
        self.own = own
        self.log = own.log

    def start(self) -> None:
        self._call("start")

    def store_init_configuration(self, fields: Mapping[str, str]) -> None:
        self._call("store_init_configuration", fields)

    def finish(self) -> None:
        self._call("finish")

    def _call(self, method: str, *arguments: Any) -> None:
        if found := getattr(self.own, method, None):
            found(*arguments)


def _own(path: str, run_dir: RunDir, recipe: Recipe, start_step: int) -> _OwnTracker:
    """Returns a tracker of the user's own that has started. Raises RecipeError with the user's file and line."""
    field, folder = "logging.trackers", recipe.code_dir
    with own_code_errors(path, folder, field, "cannot start"):
        tracker = _OwnTracker(import_object(path, folder, field)(run_dir.path, recipe, start_step))
        tracker.start()
    return tracker


def _start(name: str, run_dir: RunDir, recipe: Recipe, start_step: int, identities: dict[str, str]) -> Any:
    if is_path(name):
        return _own(name, run_dir, recipe, start_step)
    from llmtrain.overrides.accelerate import trackers_without_state

    trackers_without_state()
    tracker = TRACKERS[name](run_dir, recipe, start_step, identities)
    tracker.main_process_only = False  # otherwise each call would create accelerate's state
    tracker.start()
    if name == "mlflow":
        identities[name] = tracker.tracker.info.run_id
    return tracker


def _tensorboard(run_dir: RunDir, recipe: Recipe, start_step: int, identities: dict[str, str]) -> Any:
    from accelerate.tracking import TensorBoardTracker

    # Steps after the resumed one were logged by the lost attempt.
    return TensorBoardTracker("", run_dir.tensorboard, purge_step=start_step + 1)


def _wandb(run_dir: RunDir, recipe: Recipe, start_step: int, identities: dict[str, str]) -> Any:
    from accelerate.tracking import WandBTracker

    identity = identities.setdefault("wandb", uuid.uuid4().hex[:8])
    folder = str(run_dir.path.resolve())
    return WandBTracker(recipe.logging.project, name=recipe.name, id=identity, resume="allow", dir=folder)


def _mlflow(run_dir: RunDir, recipe: Recipe, start_step: int, identities: dict[str, str]) -> Any:
    from accelerate.tracking import MLflowTracker

    return MLflowTracker(recipe.logging.project, run_name=recipe.name, run_id=identities.get("mlflow"))


TRACKERS: dict[str, Callable[[RunDir, Recipe, int, dict[str, str]], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
"""Name of a tracker → the function that creates it. The identities are those with which a resumed run continues."""


def _store_recipe(name: str, tracker: Any, recipe: Recipe) -> None:
    """Stores the recipe as the run's parameters, and nothing else about the machine or its environment."""
    if name == "tensorboard":
        # As text: its hyperparameters would open another run in the same folder.
        text = json.dumps(recipe.model_dump(mode="json"), indent=2)
        tracker.log({"recipe": f"```json\n{text}\n```"}, step=0)
    else:
        tracker.store_init_configuration(
            {field: str(value)[:PARAMETER_LENGTH] for field, value in recipe.dotted().items()}
        )


def _identities(run_dir: RunDir) -> dict[str, str]:
    try:
        return read_json(run_dir.trackers_file, dict[str, str])
    except UNREADABLE:
        return {}
