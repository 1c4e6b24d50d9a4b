"""Optimizers of a user's own class: their updates can be skipped, and their states saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmtrain.engines.optimizers.guarded import Factor
from llmtrain.engines.state.shards import WeightSlice
from llmtrain.recipe import OptimConfig
from llmtrain.recipe.own_code import import_object, own_code_errors

FIELD = "optim.name"


def own_optimizer(groups: list[dict[str, Any]], optim: OptimConfig, code_dir: str | None) -> OwnOptimizer:
    """Returns an object of the user's class that is also an `OwnOptimizer`. Raises RecipeError if it cannot be built.

    groups: with `params` and `weight_decay`. code_dir: `Recipe.code_dir`.
    """
    kind = import_object(optim.name, code_dir, FIELD)
    both = type(kind.__name__, (OwnOptimizer, kind), {})
    with own_code_errors(optim.name, code_dir, FIELD, "cannot be built"):
        optimizer: OwnOptimizer = both(groups, lr=optim.lr, **optim.options)
    optimizer.prepare(optim.name, code_dir, lambda alone: kind(alone, lr=optim.lr, **optim.options))
    return optimizer


class OwnOptimizer(Optimizer):
    """What a user's class lacks; mixed into it.

    The class does not know `found_inf`, so the host waits for the guard's decision before each update, and skips it by
    not calling the class. This is exact, whatever the class keeps, and needs no copy of the weights.
    """

    def prepare(self, path: str, code_dir: str | None, build: Callable[[list[dict[str, Any]]], Optimizer]) -> None:
        """Completes the object. path, code_dir: for messages. build: builds another object of the class."""
        self._path, self._code_dir, self._build = path, code_dir, build
        self._step_supports_amp_scaling = False  # torch's scaler divides the gradients and drops updates itself
        self._updates: dict[Tensor, int] = {}
        self._made: set[Tensor] = set()
        self._shown: list[tuple[dict[Any, Any], Any, Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        """Takes an update, unless `found_inf` is 1. Raises RecipeError, with the user's line, if the class fails."""
        found_inf: Tensor | None = vars(self).pop("found_inf", None)
        if found_inf is not None and bool(found_inf):
            return None
        self._take_back()
        for tensor in self._made:
            if not self._updates[tensor]:  # nothing was loaded: the class begins with a state of its own
                self.state.pop(tensor, None)
        self._made.clear()
        with own_code_errors(self._path, self._code_dir, FIELD, "fails in a step"):
            step = super().step.__func__  # type: ignore[attr-defined]
            # torch wraps `step` of a class in hooks when an object of it is built; those of this object have run.
            step = step.__wrapped__ if getattr(step, "hooked", False) else step
            result = step(self) if closure is None else step(self, closure)
        for tensor in self._trained():
            if tensor.grad is not None:
                self._updates[tensor] = self._updates.get(tensor, 0) + 1
        return result

    def make_state(self, trained: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of a tensor; if it has none, one with the names and shapes that an update gives it.

        That one is dropped before the next update, unless values are loaded into it.
        """
        state: dict[str, Any] = self.state[trained]
        if state:
            return state
        alone = nn.Parameter(trained.detach().clone())
        alone.grad = torch.zeros_like(alone)
        another = self._build([{**group, "params": [alone]}])
        with own_code_errors(self._path, self._code_dir, FIELD, "fails in a step"):
            another.step()
        state.update(another.state[alone])
        self._made.add(trained)
        return state

    def updates(self, trained: Tensor) -> Tensor:
        """Returns the number of updates of a tensor; what is written to it takes effect before the next one."""
        self._updates.setdefault(trained, 0)
        return self._show(self._updates, trained)

    def factors(self, trained: Tensor) -> dict[str, Factor]:
        """Returns the states of a tensor that do not have its shape, by name: numbers, and tensors of other shapes.

        Flat parts of several weights share the numbers; each weight is saved with them.
        """
        found = {}
        state = self.state[trained]
        for name, value in state.items():
            if isinstance(value, bool | int | float):
                value = self._show(state, name)
            if isinstance(value, Tensor) and value.shape != trained.shape:
                whole = WeightSlice.whole(value.shape or (1,))
                found[name] = Factor(whole, 0, value.detach().view(-1))
        return found

    def _show(self, values: dict[Any, Any], key: Any) -> Tensor:
        """Returns a number as a scalar, from which it is taken back before the next update."""
        for shown, name, tensor in self._shown:
            if shown is values and name is key:
                return tensor
        self._shown.append((values, key, torch.tensor(float(values[key]), dtype=torch.float64)))
        return self._shown[-1][2]

    def _take_back(self) -> None:
        for values, key, tensor in self._shown:
            values[key] = type(values[key])(tensor.item())
        self._shown.clear()

    def _trained(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]
