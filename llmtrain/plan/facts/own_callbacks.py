"""Checks callbacks and trackers of a user's own before workers start."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any

from llmtrain.errors import Problem, did_you_mean
from llmtrain.recipe.callback import HOOKS, hooks_of

STATE = ("state_dict", "load_state_dict")
TRACKER_ARGUMENTS = ("run_dir", "recipe", "start_step")
"""With these a tracker's class is called."""


def callback_problems(
    field: str, path: str, found: Any, options: dict[str, Any], changes_gradients: bool = False
) -> Iterator[Problem]:
    """Yields what is wrong with a callback: its methods, and the arguments of its class.

    found: the class or the object at the path. options: the arguments that the recipe gives. changes_gradients: whether
    the recipe says that it changes gradients.
    """
    if inspect.isroutine(found) or inspect.ismodule(found):
        message = f"{path} is a {type(found).__name__}, but a callback is a class or an object with methods"
        yield Problem("callback.kind", field, f"{message} such as on_step_end", "inherit from llmtrain.Callback")
        return
    others = [name for name in dir(found) if name.startswith("on_") and name not in HOOKS]
    for name in others:
        message = f"{path} defines {name}, which no run calls{did_you_mean(name, HOOKS)}"
        yield Problem("callback.hook", field, message, f"hooks are {', '.join(HOOKS)}")
    hooks = hooks_of(found)
    if not hooks and not others:
        yield Problem("callback.none", field, f"{path} defines no hook", f"define one of {', '.join(HOOKS)}")
    for name in hooks:
        # A class's function also takes the instance.
        arguments = (None, None) if _takes_self(found, name) else (None,)
        if fault := _does_not_take(getattr(found, name), arguments, {}):
            yield Problem("callback.hook", field, f"{path}.{name} must take one argument, the context: {fault}")
        if inspect.iscoroutinefunction(getattr(found, name)):
            yield Problem("callback.hook", field, f"{path}.{name} is asynchronous, and would never run")
    if said := undeclared(path, hooks, changes_gradients):
        yield Problem("callback.gradients", field.removesuffix("object") + "changes_gradients", *said)
    if len(present := [name for name in STATE if callable(getattr(found, name, None))]) == 1:
        message = f"{path} defines {present[0]} alone; a state needs {' and '.join(STATE)}"
        yield Problem("callback.state", field, message)
    yield from _option_problems(field, path, found, options)


def undeclared(path: str, hooks: Collection[str], changes_gradients: bool) -> tuple[str, str] | None:
    """Returns a message and a fix if a recipe does not say that a callback changes gradients, or says so wrongly.

    hooks: those that the callback defines.
    """
    if changes_gradients and "on_gradients" not in hooks:
        return f"{path} defines no on_gradients, which changes gradients", "define it, or leave changes_gradients out"
    if "on_gradients" in hooks and not changes_gradients:
        message = f"must be true: {path} defines on_gradients, which changes what is trained"
        return message, 'give the callback changes_gradients=true and ranks="all"'
    return None


def _option_problems(field: str, path: str, found: Any, options: dict[str, Any]) -> Iterator[Problem]:
    field = field.removesuffix("object") + "options"
    if not inspect.isclass(found):
        if options:
            yield Problem("callback.options", field, f"{path} is an object; only a class takes options")
    elif fault := _does_not_take(found, (), options):
        yield Problem("callback.options", field, f"{path} cannot be called with these options: {fault}")


def tracker_problems(field: str, path: str, found: Any) -> Iterator[Problem]:
    """Yields what is wrong with a tracker's class."""
    log = getattr(found, "log", None)
    if not inspect.isclass(found) or not callable(log):
        message = f"{path} must be a class with a method log(values, step)"
        yield Problem("tracker.kind", field, message)
    elif fault := _does_not_take(found, TRACKER_ARGUMENTS, {}):
        yield Problem("tracker.arguments", field, f"{path} must take ({', '.join(TRACKER_ARGUMENTS)}): {fault}")
    elif fault := _does_not_take(log, (None, {}, 0), {}):
        yield Problem("tracker.arguments", field, f"{path}.log must take (values, step): {fault}")


def _takes_self(found: Any, name: str) -> bool:
    return inspect.isclass(found) and inspect.isfunction(inspect.getattr_static(found, name))


def _does_not_take(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Returns why a function does not take arguments; empty if it does, or if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        known = [*signature.parameters]
        return f"{error}" + "".join(did_you_mean(name, known) for name in options if name not in known)
    return ""
