"""The callbacks of a recipe: calls them on each rank that has them, and makes all ranks act on what they ask."""

from __future__ import annotations

import inspect
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.checkpoint.contents import CallbacksState
from llmtrain.engines.engine import ChangeGradients
from llmtrain.engines.runtime.agree import broadcast, gather, gather_problems, new_thread_group, world_size
from llmtrain.engines.runtime.distributed import rank
from llmtrain.errors import OwnCodeError, Problem, format_value, printable, truncate
from llmtrain.plan.facts.own_callbacks import undeclared
from llmtrain.recipe import (
    CallbackConfig,
    CallbackContext,
    CallbackResult,
    GradientContext,
    Recipe,
    gradient_seed,
)
from llmtrain.recipe.callback import HOOKS, hooks_of
from llmtrain.recipe.own_code import definition_line, import_object, own_code_errors
from llmtrain.train.fingerprint import FACTOR, fingerprint

METRIC_NAME = re.compile(r"[A-Za-z0-9_./-]{1,100}")
"""Names that all trackers accept."""
SHOWN_SHARE = 0.01
"""Share of the time since the last logged step from which the time in callbacks is printed."""


@dataclass(frozen=True)
class Requests:
    """What the callbacks of all ranks ask for after a step: the same on all ranks, except for the metrics."""

    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """On rank 0, the metrics of its callbacks."""
    save: bool = False
    evaluate: bool = False
    stop: str = ""
    """Why the run ends; empty if it goes on."""


@dataclass(frozen=True)
class _Callback:
    """A callback of this rank."""

    name: str
    """Its import path, with a number if the recipe has it several times."""
    place: str
    """Its field of the recipe."""
    config: CallbackConfig
    folder: str | None
    """The folder of the recipe's own code."""
    value: Any

    def errors(self, action: str) -> AbstractContextManager[None]:
        """Returns a context that raises OwnCodeError for an error of the callback."""
        return own_code_errors(self.config.object, self.folder, self.place, action, OwnCodeError)

    def call(self, hook: str, context: CallbackContext) -> CallbackResult:
        """Calls a hook. Raises OwnCodeError."""
        with self.errors(f"fails in {hook} after step {context.step:,}"), _own_random_numbers():
            return _checked(hook, getattr(self.value, hook)(context), context)

    def change_gradients(self, context: GradientContext, number: int) -> None:
        """Calls `on_gradients`. number: as for `gradient_seed`. Raises OwnCodeError."""
        with self.errors(f"fails in on_gradients of step {context.step:,}"), torch.no_grad(), _own_random_numbers():
            _seed_generators(gradient_seed(context.recipe.train.seed, context.step, number))
            if (result := self.value.on_gradients(context)) is not None:
                raise TypeError(f"it returns {format_value(result)}, but changes gradients in place")

    def fault(self, rule: str, hook: str, message: str, fix: str) -> Problem:
        """Returns a problem that begins with the file and line of a hook. message: what the hook does."""
        line = definition_line(getattr(self.value, hook))
        return Problem(rule, self.place, f"{line}{self.config.object} {message}", fix)


class Callbacks:
    """The callbacks of a run on one rank. All ranks create one, and call each method after the same step."""

    def __init__(
        self,
        recipe: Recipe | None = None,
        run_dir: Path = Path(),
        warn: Callable[[str], None] = print,
        model: nn.Module | None = None,
        only_gradients: bool = False,
    ) -> None:
        """recipe: None for no callbacks. warn: receives a message about each error that is counted. model: the one
        whose weights no hook may change. only_gradients: whether to create only callbacks that change gradients.

        Raises OwnCodeError on all ranks if a callback cannot be created on one of them.
        """
        self._recipe, self._run_dir, self._warn, self._model = recipe, run_dir, warn, model
        self._callbacks: list[_Callback] = []
        self._seconds, self._started = 0.0, time.perf_counter()
        """Time in callbacks since the last logged step, and when that was."""
        self._pending: dict[str, float | None] = {}
        self._errors = 0
        self._changed: Tensor | None = None
        """Fingerprint of all gradients that callbacks have changed."""
        self.hooks: frozenset[str] = frozenset()
        """Those that a callback of any rank defines."""
        self.awaits_save = False
        """Whether `on_save` is still to be called for the last checkpoint."""
        if recipe is None or not recipe.callbacks:
            return
        self._counts_errors = any(config.on_error == "count" for config in recipe.callbacks)
        self._group = new_thread_group()  # its collectives do not wait for the device
        problems: list[Problem] = []
        for number, (name, config) in enumerate(zip(names_of(recipe.callbacks), recipe.callbacks, strict=True)):
            if (config.ranks == "main" and rank() != 0) or (only_gradients and not config.changes_gradients):
                continue
            try:
                self._callbacks.append(_created(name, f"callbacks.{number}", config, recipe.code_dir))
            except OwnCodeError as error:
                problems += error.problems
        self._raise_together(problems)
        own = {hook for callback in self._callbacks for hook in hooks_of(callback.value)}
        self.hooks = frozenset().union(*gather(own, self._group))

    def call(
        self,
        hook: str,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        is_logged: bool = False,
        checkpoint: Path | None = None,
    ) -> Requests:
        """Calls a hook of all callbacks, and returns what those of all ranks ask for.

        metrics: the record of the step or the evaluation, on rank 0. is_logged: whether rank 0 has one. Raises
        OwnCodeError on all ranks.
        """
        if hook not in self.hooks:
            return Requests()
        assert self._recipe is not None
        started = time.perf_counter()
        known = dict(metrics or {})
        if is_logged and any(config.ranks == "all" for config in self._recipe.callbacks):
            known = broadcast(known, group=self._group)
        told = MappingProxyType(known)
        context = CallbackContext(step, told, self._run_dir, self._recipe, rank(), world_size(), checkpoint)
        results: list[CallbackResult] = []
        problems: list[Problem] = []
        errors = 0
        own = [callback for callback in self._callbacks if hook in hooks_of(callback.value)]
        # A step that is not logged does not wait for the device.
        weights = partial(self._weights, is_compared=is_logged or hook != "on_step_end")
        before = weights() if own else ()
        for callback in own:
            try:
                results.append(callback.call(hook, context))
            except OwnCodeError as error:
                if callback.config.on_error == "stop":
                    problems += error.problems
                else:
                    errors += 1
                    self._warn(str(error))
            if (after := weights()) != before:
                before = after
                problems.append(_weights_changed(callback, hook, step))
        requests = self._agreed(results, problems, errors)
        self._seconds += time.perf_counter() - started
        return requests

    def gradient_hook(self, step: int) -> ChangeGradients | None:
        """Returns what changes the gradients of a step, counted from 1; None if no callback does.

        All ranks call it. It raises OwnCodeError on all ranks.
        """
        return partial(self._change_gradients, step) if "on_gradients" in self.hooks else None

    def _change_gradients(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        assert self._recipe is not None
        context = GradientContext(step, MappingProxyType(dict(gradients)), self._recipe)
        problems: list[Problem] = []
        for number, callback in enumerate(self._of_gradients()):
            try:
                callback.change_gradients(context, number)
            except OwnCodeError as error:
                problems += error.problems
        if self._sums([bool(problems)])[0]:
            self._raise_together(problems)
        of_step = fingerprint(gradients.values())
        self._changed = of_step if self._changed is None else self._changed * FACTOR + of_step

    def check_gradients(self, step: int) -> None:
        """Raises OwnCodeError on all ranks if callbacks have changed gradients in another way on one of them.

        step: the last one. Called by all ranks; waits for the device.
        """
        if self._changed is None:
            return
        found = gather(int(self._changed), self._group)
        if others := [other for other, number in enumerate(found) if number != found[0]]:
            message = f"changes gradients in another way on rank {others[0]} than on rank 0, by step {step:,}"
            fix = "draw random numbers with torch, which seeds them alike on all ranks in this hook"
            raise OwnCodeError(
                [one.fault("callback.ranks_differ", "on_gradients", message, fix) for one in self._of_gradients()]
            )

    def _of_gradients(self) -> list[_Callback]:
        return [callback for callback in self._callbacks if callback.config.changes_gradients]

    def _weights(self, is_compared: bool) -> tuple[int, ...]:
        """Returns numbers that differ after the weights have been changed.

        torch counts the changes of a tensor, but not those through its `data`: is_compared: whether to notice them,
        too, which waits for the device.
        """
        weights = list(self._model.parameters()) if self._model else []
        versions = [number for weight in weights for number in (id(weight), weight._version)]
        return (*versions, int(fingerprint(weights))) if is_compared else (*versions,)

    def all_ranks(self, value: bool) -> bool:
        """Whether a value is true on all ranks. For runs with callbacks."""
        return self._sums([not value])[0] == 0

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Keeps metrics for the next logged step."""
        self._pending |= metrics

    def metrics_of_window(self) -> dict[str, float | None]:
        """Returns the metrics for the line of a logged step, and begins the next window; on rank 0."""
        if not self.hooks:
            return {}
        metrics: dict[str, float | None] = {**self._pending, "callbacks_s": self._seconds}
        if self._counts_errors:
            metrics["callback_errors"] = self._errors
        self._pending, self._seconds, self._started = {}, 0.0, time.perf_counter()
        return metrics

    def line(self) -> str | None:
        """Returns a line about the time in callbacks since the last logged step; None if it is short."""
        share = self._seconds / (time.perf_counter() - self._started)
        return f"callbacks take {share:.0%} of the time" if share > SHOWN_SHARE else None

    def state(self, step: int) -> CallbacksState:
        """Returns what a checkpoint stores: the state of rank 0's callbacks. Raises OwnCodeError on all ranks, also if
        their gradients have differed. step: the last one."""
        if not self.hooks:
            return CallbacksState()
        self.check_gradients(step)
        states: dict[str, Any] = {}
        problems: list[Problem] = []
        for callback in self._callbacks if rank() == 0 else ():
            if not hasattr(callback.value, "state_dict"):
                continue
            try:
                with callback.errors("fails in state_dict, which must return JSON data"):
                    states[callback.name] = json.loads(json.dumps(callback.value.state_dict(), allow_nan=False))
            except OwnCodeError as error:
                problems += error.problems
        self._raise_together(problems)
        return broadcast(CallbacksState(states, dict(self._pending), self._errors), group=self._group)

    def load(self, state: CallbacksState) -> None:
        """Continues from a checkpoint. A callback that the checkpoint does not know keeps its state.

        Raises OwnCodeError on all ranks.
        """
        if not self.hooks:
            return
        self._pending, self._errors = dict(state.metrics), state.errors
        problems: list[Problem] = []
        for callback in self._callbacks:
            if callback.name not in state.states or not hasattr(callback.value, "load_state_dict"):
                continue
            try:
                with callback.errors("fails in load_state_dict"):
                    callback.value.load_state_dict(state.states[callback.name])
            except OwnCodeError as error:
                problems += error.problems
        self._raise_together(problems)

    def _agreed(self, results: list[CallbackResult], problems: list[Problem], errors: int) -> Requests:
        save, evaluate = (any(getattr(result, name) for result in results) for name in ("save", "evaluate"))
        stop = next((result.stop for result in results if result.stop), "")
        saves, evaluations, stops, failed, counted = self._sums([save, evaluate, bool(stop), bool(problems), errors])
        if failed:
            self._raise_together(problems)
        self._errors += counted
        if stops:
            stop = next(filter(None, gather(stop, self._group)))
        metrics = {name: value for result in results for name, value in result.metrics.items()}
        return Requests(metrics, saves > 0, evaluations > 0, stop)

    def _sums(self, numbers: Iterable[int]) -> list[int]:
        """Returns the sums over all ranks."""
        sums = torch.tensor([int(number) for number in numbers])
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        return sums.tolist()

    def _raise_together(self, problems: list[Problem]) -> None:
        if problems := gather_problems(problems, self._group):
            raise OwnCodeError(problems)


def names_of(callbacks: Iterable[CallbackConfig]) -> list[str]:
    """Returns a name for each callback: its import path, with a number from its second occurrence on."""
    paths = [callback.object for callback in callbacks]
    counts = [paths[: number + 1].count(path) for number, path in enumerate(paths)]
    return [path if count == 1 else f"{path} {count}" for path, count in zip(paths, counts, strict=True)]


def _created(name: str, place: str, config: CallbackConfig, folder: str | None) -> _Callback:
    callback = _Callback(name, place, config, folder, None)
    with callback.errors("cannot be created"):
        value = import_object(config.object, folder, f"{place}.object")
        callback = replace(callback, value=value(**config.options) if inspect.isclass(value) else value)
    if fault := undeclared(config.object, hooks_of(callback.value), config.changes_gradients):
        raise OwnCodeError(Problem("callback.gradients", f"{place}.changes_gradients", *fault))
    return callback


def _weights_changed(callback: _Callback, hook: str, step: int) -> Problem:
    message = f"changes weights in {hook} after step {step:,}, but only the optimizer may change them"
    fix = "change gradients in on_gradients, or write an optimizer or a model of your own"
    return callback.fault("callback.weights", hook, message, fix)


def _seed_generators(seed: int) -> None:
    """Seeds the generators that `_own_random_numbers` has copied: not those of other devices."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


def _own_random_numbers() -> AbstractContextManager[None]:
    """Returns a context after which torch's generators are as before, so that training draws the same numbers.

    Otherwise ranks that must draw the same numbers, as tensor parallel ones, would differ from the one with a callback.
    """
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])


def _checked(hook: str, result: Any, context: CallbackContext) -> CallbackResult:
    """Returns the result of a hook. Raises TypeError or ValueError for what it may not return."""
    if result is None:
        return CallbackResult()
    if not isinstance(result, CallbackResult):
        raise TypeError(f"it returns {format_value(result)}, which is neither None nor a llmtrain.CallbackResult")
    for item in fields(result):
        if getattr(result, item.name) and item.name not in HOOKS[hook]:
            raise ValueError(f"it asks for {item.name}, which {hook} cannot; it may set {_listed(HOOKS[hook])}")
    if result.evaluate and not context.recipe.evaluation.every_steps:
        raise ValueError("it asks for an evaluation, but evaluation.every_steps is 0: no data are held out for it")
    if not isinstance(result.stop, str):
        raise TypeError(f"its stop is {format_value(result.stop)}, which is not a text that says why")
    metrics = dict(_metrics(result.metrics, context.metrics))
    return CallbackResult(metrics, bool(result.save), bool(result.evaluate), printable(truncate(result.stop)))


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(names) or "nothing"


def _metrics(metrics: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yields a callback's metrics; None for numbers that are not finite. known: the names of the run's own."""
    for name, value in metrics.items():
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            raise ValueError(f"a metric is named {format_value(name)}; use letters, digits and the characters _ . / -")
        if name in known or name in ("step", "time"):
            raise ValueError(f"the run itself logs {name}; use another name")
        number = value.item() if hasattr(value, "item") else value  # a tensor, or a number of NumPy
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"its metric {name} is {format_value(value)}, which is not a number")
        yield name, float(number) if math.isfinite(number) else None
