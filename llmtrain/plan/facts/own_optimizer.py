"""Tries an optimizer of a user's own on a few numbers: what it keeps, and which parts of weights it may be given.

A helper process builds the class and takes some steps. Whole weights are compared with flat parts of them, as ZeRO has
them on its ranks, and with a second object that continues from the states of the first, as a checkpoint has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from llmtrain.errors import Problem, RecipeError, format_value
from llmtrain.plan.facts.helper_process import run_helper
from llmtrain.plan.facts.own_code import OwnCode, cache_path, identified, is_current, write_cache
from llmtrain.recipe import Part, Recipe
from llmtrain.recipe.own_code import import_object, is_path, own_code_errors
from llmtrain.recipe.parts import Many
from llmtrain.system.untrusted import UNREADABLE, read_json

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

FIELD = "optim.name"
STEPS = 8
RATE = 1e-2
DECAY = 0.1
MAX_DEVIATION = 1e-3
"""Largest difference between two divisions, relative to the largest movement of a weight. Weights of about 1 that move
by `RATE` in a step have rounding errors of 2⁻²⁴ / `RATE` ≈ 6e-6 of it. An update that depends on other elements of the
weight, or on their number, differs by a share of itself."""


Unit = Literal["element", "weight", "model"]


class TriedOptimizer(Part):
    """What a trial found out about an optimizer of a user's own."""

    unit: Unit
    """What its update may be computed from: single elements, whole weights, or all weights together."""
    deviation: float
    """Largest difference that flat parts of weights make, relative to the movement of the weights."""
    states: dict[str, int] = Field(default_factory=dict)
    """State with the shape of its weight → bytes of an element."""
    scalars: Many[str] = ()
    """States that are numbers: one for each tensor."""
    others: Many[str] = ()
    """States of other shapes."""
    decays: bool = True
    """Whether it has a `weight_decay`."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of an element."""
        return sum(self.states.values())


class _Cached(Part):
    code: OwnCode
    tried: TriedOptimizer


def tried_optimizer(recipe: Recipe) -> TriedOptimizer | None:
    """Returns what a trial of a recipe's own optimizer found; None if its optimizer is one of llmtrain.

    The result is cached until the code changes. Raises RecipeError if the class cannot be used at all.
    """
    optim, folder = recipe.optim, recipe.code_dir
    if not is_path(optim.name):
        return None
    request = {"optimizer": optim.name, "options": optim.options, "folder": folder}
    path = cache_path(request)
    try:
        known = read_json(path, _Cached)
    except UNREADABLE:
        known = None
    if known is None or not is_current(known.code, folder):
        known = _Cached.model_validate(run_helper(__name__, request, f"the process that tries {optim.name}"))
        write_cache(path, known)
    return known.tried


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Tries the optimizer of a request, and returns the fields of `_Cached`. Raises RecipeError."""
    from torch.optim import Optimizer

    path, folder = request["optimizer"], request["folder"]
    kind = import_object(path, folder, FIELD)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise _refusal("code.kind", f"{path} is {format_value(kind)}, not a subclass of torch.optim.Optimizer")
    tried = _Trial(kind, path, folder, request["options"]).result()
    code = identified({path.partition(":")[0].partition(".")[0]}, folder)
    return _Cached(code=code, tried=tried).model_dump()


def _refusal(rule: str, message: str) -> RecipeError:
    return RecipeError(Problem(rule, FIELD, message))


Piece = tuple[int, tuple[int, ...]]
"""A part of a group, which is flat: its first element, and the shape in which the optimizer gets it."""
Division = list[list[list[Piece]]]
"""For each object of the optimizer, as ranks have them, the pieces of each group."""
WHOLE: Division = [[[(0, (6, 5)), (30, (4, 3, 2))], [(0, (7,)), (7, (3,))]]]
"""Matrices, which decay, and vectors, which do not."""
SIZES = (54, 10)
"""Elements of the groups."""
FLAT: Division = [[[(0, (11,))], [(0, (4,))]], [[(11, (26,))], [(4, (3,))]], [[(37, (17,))], [(7, (3,))]]]
SEPARATE: Division = [[[(0, (6, 5))], [(0, (7,))]], [[(30, (4, 3, 2))], [(7, (3,))]]]


@dataclass
class _Run:
    """Groups that were trained for some steps."""

    weights: list[Tensor]
    optimizers: list[Optimizer] = field(default_factory=list)


class _Trial:
    """Trains the same numbers in several divisions."""

    def __init__(self, kind: Any, path: str, folder: str | None, options: dict[str, Any]) -> None:
        import torch

        self._kind, self._path, self._folder, self._options = kind, path, folder, options
        generator = torch.Generator().manual_seed(1)
        self._first = [torch.randn(size, generator=generator) for size in SIZES]
        self._gradients = [[torch.randn(size, generator=generator) for size in SIZES] for _ in range(STEPS)]

    def result(self) -> TriedOptimizer:
        """Returns what was found. Raises RecipeError for a class that could not be trained with, or continued."""
        with own_code_errors(self._path, self._folder, FIELD, "fails"):
            optimizer = self._build([[self._first[0].clone()], [self._first[1].clone()]])
        self._check_built(optimizer)
        makes_states_at_once = bool(optimizer.state)
        with own_code_errors(self._path, self._folder, FIELD, "fails in a step"):
            whole = self._train(WHOLE)
        self._check_movement(whole)
        kept = self._kept(whole.optimizers[0])
        if self._deviation(self._train(WHOLE), whole) > MAX_DEVIATION:
            raise _refusal("code.repeats", f"{self._path} trains other weights when it is run again")
        self._check_continuation(whole)
        deviation = math.inf if makes_states_at_once else self._try(FLAT, whole)
        is_elementwise = deviation <= MAX_DEVIATION and not kept["others"]
        by_weight = self._try(SEPARATE, whole) <= MAX_DEVIATION
        unit: Unit = "element" if is_elementwise else "weight" if by_weight else "model"
        finite = min(deviation, 1e9)
        return TriedOptimizer(unit=unit, deviation=finite, decays="weight_decay" in optimizer.defaults, **kept)

    def _build(self, groups: Sequence[Sequence[Tensor]]) -> Optimizer:
        from torch import nn

        optimizer: Optimizer = self._kind(
            [
                {"params": [nn.Parameter(tensor) for tensor in group], "weight_decay": decay}
                for group, decay in zip(groups, (DECAY, 0.0), strict=True)
            ],
            lr=RATE,
            **self._options,
        )
        return optimizer

    def _check_built(self, optimizer: Optimizer) -> None:
        if "lr" not in optimizer.defaults:
            message = f"{self._path} has no `lr` in its defaults, so no schedule could set its learning rate"
            raise _refusal("code.optimizer", message)

    def _check_movement(self, run: _Run) -> None:
        if not all(bool(weights.isfinite().all()) for weights in run.weights):
            raise _refusal("code.optimizer", f"{self._path} trained weights that are not finite")
        if not self._movement(run):
            raise _refusal("code.optimizer", f"{self._path} changed no weight")

    def _train(self, division: Division, steps: int = STEPS, after: _Run | None = None) -> _Run:
        """Trains for some steps; after: a run of one object from whose states this one continues."""
        done = 0 if after is None else STEPS - steps
        run = _Run([group.clone() for group in (after.weights if after else self._first)])
        for groups in division:
            parts = [
                [group[first : first + math.prod(shape)].view(shape).clone() for first, shape in pieces]
                for group, pieces in zip(run.weights, groups, strict=True)
            ]
            optimizer = self._build(parts)
            if after is not None:
                self._copy_states(after.optimizers[0], optimizer)
            for step in range(done, done + steps):
                self._step(optimizer, groups, step)
            for weights, pieces, group in zip(run.weights, groups, optimizer.param_groups, strict=True):
                for (first, shape), parameter in zip(pieces, group["params"], strict=True):
                    weights[first : first + math.prod(shape)] = parameter.detach().flatten()
            run.optimizers.append(optimizer)
        return run

    def _step(self, optimizer: Optimizer, groups: list[list[Piece]], step: int) -> None:
        for pieces, group, gradients in zip(groups, optimizer.param_groups, self._gradients[step], strict=True):
            group["lr"] = RATE * (1 - step / (2 * STEPS))  # as a schedule does
            for (first, shape), parameter in zip(pieces, group["params"], strict=True):
                parameter.grad = gradients[first : first + math.prod(shape)].view(shape).clone()
        optimizer.step()

    def _copy_states(self, source: Optimizer, target: Optimizer) -> None:
        for old, new in zip(_parameters(source), _parameters(target), strict=True):
            state = source.state.get(old, {})
            target.state[new] = {name: _copied(value) for name, value in state.items()}

    def _kept(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the states, by what they are. Raises RecipeError for values that a checkpoint cannot hold."""
        import torch

        states: dict[str, int] = {}
        scalars: dict[str, None] = {}
        others: dict[str, None] = {}
        for parameter in _parameters(optimizer):
            for name, value in optimizer.state[parameter].items():
                if value is None:
                    continue
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    states[name] = value.element_size()
                elif isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                    scalars[name] = None
                elif isinstance(value, torch.Tensor):
                    others[name] = None
                else:
                    what = f"{format_value(name)}, {format_value(value)}"
                    message = f"{self._path} keeps the state {what}, which is neither a tensor nor a number"
                    raise _refusal("code.state", f"{message}; a checkpoint could not hold it")
        return {"states": states, "scalars": tuple(scalars), "others": tuple(others)}

    def _check_continuation(self, whole: _Run) -> None:
        """Raises RecipeError if a new object with the same states trains other weights."""
        half = self._train(WHOLE, STEPS // 2)
        with own_code_errors(self._path, self._folder, FIELD, "fails to continue from its own states"):
            continued = self._train(WHOLE, STEPS - STEPS // 2, half)
        deviation = self._deviation(continued, whole)
        if deviation > MAX_DEVIATION:
            message = (
                f"{self._path} keeps something outside `state[parameter]`, which a checkpoint could not hold: with the "
                f"same states, a new object trains other weights, by {deviation:.0%} of their movement"
            )
            raise _refusal("code.state", message)

    def _try(self, division: Division, whole: _Run) -> float:
        """Returns the deviation of a division; infinite if the class fails for it."""
        try:
            return self._deviation(self._train(division), whole)
        except Exception:
            return math.inf

    def _deviation(self, run: _Run, other: _Run) -> float:
        pairs = zip(run.weights, other.weights, strict=True)
        largest = max(float((a - b).abs().max()) for a, b in pairs) / self._movement(other)
        return largest if math.isfinite(largest) else math.inf

    def _movement(self, run: _Run) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(run.weights, self._first, strict=True))


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _copied(value: Any) -> Any:
    clone: Callable[[], Any] | None = getattr(value, "clone", None)
    return clone() if clone else value
