"""What Liger would change in a model, found out without changing anything else.

Liger replaces classes and functions of `transformers` for the whole process. Here it does so to a copy without memory;
what it assigned to Python modules is taken back, and what it changed in the copy's modules is named. So plain models
can be trained in the same process, and a pipeline's stage, which has holes, is changed where it has layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

Space = dict[str, Any]
"""Names and what they stand for, in a module of Python or in an object."""


class NoKernelsError(Exception):
    """Liger does not know the family."""


@dataclass(frozen=True)
class Patch:
    """What Liger changes in a module of a model."""

    kind: type[nn.Module]
    values: Mapping[str, Any]
    """Attributes that its kernels read."""
    methods: Mapping[str, Callable[..., Any]]
    children: Mapping[str, nn.Module]
    """Without parameters: activation functions."""

    def apply(self, module: nn.Module) -> None:
        """Changes a module, unless it is a hole, or computes otherwise than its class already."""
        if type(module) is not self.kind or "forward" in vars(module):
            return
        vars(module).update(self.values)
        vars(module).update({name: MethodType(method, module) for name, method in self.methods.items()})
        for name, child in self.children.items():
            setattr(module, name, child)


@dataclass(frozen=True)
class Replaced:
    """Functions of a Python module that Liger has replaced."""

    space: Space
    functions: Space


def liger_patches(config: PreTrainedConfig) -> dict[str, Patch]:
    """What Liger changes in a model of `config` but for its loss and its experts, by the names of the modules.

    Raises NoKernelsError for a family that Liger does not know.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from liger_kernel.transformers.swiglu import LigerExperts

    change = MODEL_TYPE_TO_APPLY_LIGER_FN.get(config.model_type)
    if change is None:
        raise NoKernelsError("Liger has no kernels for it")
    with torch.device("meta"), no_init_weights():
        copy = AutoModelForCausalLM.from_config(deepcopy(config))
    plain = {name: (dict(vars(module)), dict(module._modules)) for name, module in copy.named_modules()}
    with _confined(copy) as replaced:
        change(model=copy, cross_entropy=False, fused_linear_cross_entropy=False)
    patches = {name: _difference(copy.get_submodule(name), *before, replaced) for name, before in plain.items()}
    # Experts stay: `transformers` runs all of them in grouped products.
    return {name: patch for name, patch in patches.items() if patch and not _is(patch, LigerExperts.forward)}


def _is(patch: Patch, forward: Callable[..., Any]) -> bool:
    return patch.methods.get("forward") is forward


def _difference(module: nn.Module, attributes: Space, children: Space, replaced: list[Replaced]) -> Patch | None:
    """Between a module and what it was; None where nothing of it was changed, nor a function that it calls."""
    changed = {name: value for name, value in vars(module).items() if _differs(name, value, attributes)}
    methods = {name: value.__func__ for name, value in changed.items() if isinstance(value, MethodType)}
    values = {name: value for name, value in changed.items() if name not in methods}
    others = {name: child for name, child in module._modules.items() if child and _differs(name, child, children)}
    if "forward" not in methods and (forward := _with_replaced(type(module).forward, replaced)):
        methods["forward"] = forward
    return Patch(type(module), values, methods, others) if values or methods or others else None


def _differs(name: str, value: object, before: Space) -> bool:
    return name not in before or before[name] is not value


def _with_replaced(function: Any, replaced: list[Replaced]) -> FunctionType | None:
    """The function with Liger's in the place of those that it calls; None where it calls none of them."""
    if not isinstance(function, FunctionType):
        return None
    spaces = [one.functions for one in replaced if one.space is function.__globals__]
    called = {name: new for space in spaces for name, new in space.items() if name in function.__code__.co_names}
    if not called:
        return None
    space = function.__globals__ | called
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@contextmanager
def _confined(model: nn.Module) -> Iterator[list[Replaced]]:
    """Takes back what is assigned to the Python modules that a model's code is in, and to torch's.

    Yields a list that is filled at the end.
    """
    code = {sys.modules[type(module).__module__] for module in model.modules()} | {nn, nn.functional}
    spaces = [(vars(module), dict(vars(module))) for module in code]
    replaced: list[Replaced] = []
    try:
        yield replaced
    finally:
        for space, before in spaces:
            new = {name: value for name, value in space.items() if _differs(name, value, before)}
            for name in new:
                if name in before:
                    space[name] = before[name]
                else:
                    del space[name]
            functions = {name: value for name, value in new.items() if isinstance(value, FunctionType)}
            replaced.append(Replaced(space, functions))
