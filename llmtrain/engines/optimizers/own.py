"""Optimizers of a user's own: their updates can be skipped, and their states saved and loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmtrain.engines.optimizers.guarded import Factor
from llmtrain.engines.state.shards import WeightSlice
from llmtrain.errors import CheckpointError, Problem, RecipeError
from llmtrain.plan.facts.own_optimizer import (
    FIELD,
    TriedOptimizer,
    averages,
    build,
    copied,
    is_number,
    numbers_of,
    switch_to,
    type_of,
)
from llmtrain.recipe import OptimConfig, Recipe
from llmtrain.recipe.own_code import own_code_errors

OF_GROUP = "group_"
"""Prefix of the kinds that are numbers of a parameter group; each of its weights is saved with them."""


def own_optimizer(
    groups: list[dict[str, Any]], optim: OptimConfig, code_dir: str | None, tried: TriedOptimizer | None
) -> OwnOptimizer:
    """Returns what the user's class or function makes, as an `OwnOptimizer`. Raises RecipeError if it cannot be built.

    groups: with `params` and `weight_decay`. code_dir: `Recipe.code_dir`. tried: what its trial found.
    """

    def build_with(groups: list[dict[str, Any]]) -> Optimizer:
        return build(groups, optim.name, optim.options, optim.lr, code_dir)

    optimizer: Any = build_with(groups)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (OwnOptimizer, kind), {})
    optimizer.prepare(optim.name, code_dir, build_with, tried.group_numbers if tried else {})
    own: OwnOptimizer = optimizer
    return own


def averaged_weight(weight: Tensor, states: dict[str, Tensor], recipe: Recipe, tried: TriedOptimizer) -> Tensor:
    """Returns the average that an optimizer has of a weight, from what a checkpoint holds of it.

    weight: whole. states: by kind. tried: what the optimizer's trial found.
    """
    optim = recipe.optim
    parameter = nn.Parameter(weight.clone())
    decay = optim.weight_decay if weight.ndim > 1 else 0.0
    groups = [{"params": [parameter], "weight_decay": decay}]
    optimizer: Any = build(groups, optim.name, optim.options, optim.lr, recipe.code_dir)
    for name, kind in tried.group_numbers.items():
        number = states.pop(OF_GROUP + name).item()
        if not math.isnan(number):
            optimizer.param_groups[0][name] = _number(kind, number)
    optimizer.state[parameter] = {
        name: state.item() if name in tried.scalars else state for name, state in states.items()
    }
    switch_to("eval", optimizer, optim.name, recipe.code_dir)
    return parameter.detach()


class OwnOptimizer(Optimizer):
    """What a user's class lacks; mixed into the class of an object.

    The class does not know `found_inf`, so the host waits for the guard's decision before each update, and skips it by
    not calling the class. This is exact, whatever the class keeps, and needs no copy of the weights.

    DeepSpeed updates parts of a group one after the other (ZeRO-3). Each of them sees the numbers of the group as its
    own last update left them.

    Attributes begin with two underscores, so that they differ from those of the class; it has no method in `RESERVED`.
    """

    def prepare(
        self,
        path: str,
        code_dir: str | None,
        build: Callable[[list[dict[str, Any]]], Optimizer],
        group_numbers: dict[str, str],
    ) -> None:
        """Completes the object.

        path, code_dir: for messages. build: builds another object. group_numbers: as in `TriedOptimizer`.
        """
        self.__path, self.__code_dir, self.__build, self.__group_numbers = path, code_dir, build, group_numbers
        self._step_supports_amp_scaling = False  # torch's scaler divides the gradients and drops updates itself
        self.__updates: dict[Tensor, int] = {}
        self.__made: set[Tensor] = set()
        self.__shown: list[tuple[dict[Any, Any], Any, Tensor]] = []
        self.__first = [
            {name: copied(value) for name, value in numbers_of(group).items()} for group in self.param_groups
        ]
        self.__numbers: dict[Tensor, dict[str, Any]] = {}
        self.__is_averaged = False
        self.__group_of: dict[Tensor, dict[str, Any]] = {}

    def step(self, closure: Any = None) -> Any:
        """Takes an update, unless `found_inf` is 1. Raises RecipeError, with the user's line, if the class fails."""
        found_inf: Tensor | None = vars(self).pop("found_inf", None)
        if found_inf is not None and bool(found_inf):
            return None
        self.__begin()
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["params"]] or groups  # ZeRO-3 empties the others
        if self.__group_numbers:
            self.__set_numbers()
        try:
            with own_code_errors(self.__path, self.__code_dir, FIELD, "fails in a step"):
                step = super().step.__func__  # type: ignore[attr-defined]
                # torch wraps `step` of a class in hooks when an object of it is built; those of this object have run.
                step = step.__wrapped__ if getattr(step, "hooked", False) else step
                result = step(self) if closure is None else step(self, closure)
            self.__keep_numbers()
        finally:
            self.param_groups = groups
        return result

    # As torch does for the class of an object that it builds.
    step = Optimizer.profile_hook_step(step)
    step.hooked = True  # type: ignore[attr-defined]

    @contextmanager
    def averaged(self, trained: list[Tensor], changed: Callable[[], object]) -> Iterator[None]:
        """Calls the class's `eval` before the context, and `train` after it; all weights then have the same bits again.

        trained: all that this optimizer trains on this rank. changed: called after each of the two, by all ranks.
        """
        if self.__is_averaged or not averages(self):
            yield
            return
        self.__begin()
        groups, known = self.param_groups, [tensor for tensor in trained if tensor in self.__group_of]
        # A group for each tensor, because ZeRO-3 leaves the groups empty.
        apart = [{**self.__group_of[one], **self.__numbers_of(one), "params": [one]} for one in known]
        weights = [tensor.clone() for tensor in known]

        def switch(mode: str) -> None:
            self.param_groups = apart
            try:
                switch_to(mode, self, self.__path, self.__code_dir)
            finally:
                self.param_groups = groups

        switch("eval")
        changed()
        self.__is_averaged = True
        try:
            yield
        finally:
            self.__is_averaged = False
            switch("train")
            for tensor, value in zip(known, weights, strict=True):
                tensor.copy_(value)
            changed()

    def __begin(self) -> None:
        """Takes loaded values, and drops made states into which none were loaded: the class begins with its own."""
        self.__take_back()
        for tensor in self.__made:
            if not self.__updates[tensor]:
                self.state.pop(tensor, None)
        self.__made.clear()

    def make_state(self, trained: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of a tensor; if it has none, one with the names and shapes that an update gives it.

        That one is dropped before the next update, unless values are loaded into it. group: the tensor's group.
        """
        self.__check_numbers(group)
        self.__group_of[trained] = group
        state: dict[str, Any] = self.state[trained]
        if state:
            return state
        self.__made.add(trained)
        alone = nn.Parameter(trained.detach().clone())
        alone.grad = torch.ones_like(alone)  # a class may divide by it, or do nothing without one
        another = self.__build([{"params": [alone], "weight_decay": group["weight_decay"]}])
        with own_code_errors(self.__path, self.__code_dir, FIELD, "fails in a step"):
            another.step()
        state.update(another.state[alone])
        return state

    def updates(self, trained: Tensor) -> Tensor:
        """Returns the number of updates of a tensor; what is written to it takes effect before the next one."""
        self.__updates.setdefault(trained, 0)
        return self.__show(self.__updates, trained)

    def factors(self, trained: Tensor) -> dict[str, Factor]:
        """Returns the states of a tensor that do not have its shape, by name: numbers, and tensors of other shapes.

        Flat parts of several weights share the numbers; each weight is saved with them, and with those of its group.
        """
        found = {}
        state = self.state[trained]
        for name, value in state.items():
            if is_number(value) and not (isinstance(value, Tensor) and value.is_floating_point()):
                value = self.__show(state, name)
            if isinstance(value, Tensor) and value.shape != trained.shape:
                whole = WeightSlice.whole(value.shape or (1,))
                found[name] = Factor(whole, 0, value.detach().view(-1))
        for name in self.__group_numbers:
            shown = self.__show(self.__numbers_of(trained), name)
            found[OF_GROUP + name] = Factor(WeightSlice.whole((1,)), 0, shown.view(-1))
        return found

    def __numbers_of(self, trained: Tensor) -> dict[str, Any]:
        """Returns the numbers of its group with which the next update of a tensor begins."""
        if trained not in self.__numbers:
            first = self.__first[0]  # in the others, numbers that change begin with the same values
            self.__numbers[trained] = {name: copied(first[name]) for name in self.__group_numbers if name in first}
        return self.__numbers[trained]

    def __set_numbers(self) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            numbers, *others = (self.__numbers_of(tensor) for tensor in group["params"])
            if any(other is not numbers and other != numbers for other in others):
                message = f"has other numbers of {self.__path} for some weights of a group than for others"
                raise CheckpointError(Problem("checkpoint.content", FIELD, message))
            for name in self.__group_numbers:
                group.pop(name, None)
            group.update(numbers)

    def __keep_numbers(self) -> None:
        for group in self.param_groups:
            numbers = {name: group[name] for name in self.__group_numbers if name in group}
            for tensor in group["params"]:
                self.__group_of[tensor] = group
                self.__numbers[tensor] = numbers
                if tensor.grad is not None:
                    self.__updates[tensor] = self.__updates.get(tensor, 0) + 1

    def __check_numbers(self, group: dict[str, Any]) -> None:
        """Raises RecipeError if a number of a group has changed that did not change in the trial."""
        for name, value in numbers_of(group).items():
            first = [numbers[name] for numbers in self.__first if name in numbers]
            if name not in self.__group_numbers and first and value not in first:
                message = (
                    f"{self.__path} has changed {name!r} of `param_groups`, but did not do so in the trial before the "
                    "run, so a checkpoint would not hold it; set it in every step"
                )
                raise RecipeError(Problem("code.state", FIELD, message))

    def __show(self, values: dict[Any, Any], key: Any) -> Tensor:
        """Returns a number as a scalar, from which it is taken back before the next update; NaN if it is missing."""
        for shown, name, tensor in self.__shown:
            if shown is values and name is key:
                return tensor
        self.__shown.append((values, key, torch.tensor(float(values.get(key, math.nan)), dtype=torch.float64)))
        return self.__shown[-1][2]

    def __take_back(self) -> None:
        for values, key, tensor in self.__shown:
            value, number = values.get(key), tensor.item()
            if isinstance(value, Tensor):
                value.fill_(number)
            elif math.isnan(number) and key in self.__group_numbers and key not in self.__first[0]:
                values.pop(key, None)
            else:
                values[key] = _number(self.__group_numbers[key] if value is None else type_of(value), number)
        self.__shown.clear()


def _number(kind: str, number: float) -> Any:
    """Returns a number as one of a kind, which `TriedOptimizer.group_numbers` describes."""
    if kind == "bool":
        return bool(number)
    if kind == "int" and number.is_integer():
        return int(number)
    return number if kind in ("int", "float") else torch.tensor(number, dtype=getattr(torch, kind))
