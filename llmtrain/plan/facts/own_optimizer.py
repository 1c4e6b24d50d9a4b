"""Tries an optimizer of a user's own on a few numbers: what it keeps, and which parts of weights it may be given.

A helper process builds it and takes some steps. Whole weights are compared with flat parts of them, as ZeRO has them on
its ranks, and with a second object that continues from the states of the first, as a checkpoint has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from llmtrain.errors import Problem, RecipeError, format_value
from llmtrain.plan.facts.helper_process import run_helper
from llmtrain.plan.facts.own_code import OwnCode, cache_path, identified, is_current, write_cache
from llmtrain.recipe import Part, Recipe
from llmtrain.recipe.own_code import import_object, is_path, own_code_errors
from llmtrain.recipe.parts import Many
from llmtrain.system.piece_headers import CODE, SCALE, WEIGHT
from llmtrain.system.untrusted import UNREADABLE, read_json

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

FIELD = "optim.name"
STEPS = 8
RATE = 1e-2
DECAY = 0.1
LARGE_RATE = 1.0
"""For classes that estimate how far to go, and begin with very small steps."""
SIZE = 0.02
"""Standard deviation of the first weights, as of those of a model."""
MAX_DEVIATION = 1e-3
"""Largest difference between two divisions, relative to the largest movement of a weight. Weights of about `SIZE` that
move by `RATE` in a step have rounding errors of 2⁻²⁴ · `SIZE` / `RATE` ≈ 1e-7 of it. An update that depends on other
elements of the weight, or on their number, differs by a share of itself."""
SCHEDULED = frozenset({"params", "lr", "initial_lr", "weight_decay"})
"""Entries of a parameter group that the recipe determines."""
RESERVED = ("prepare", "averaged", "make_state", "updates", "factors")
"""Methods that an engine adds to the object (`engines/optimizers/own.py`)."""
_NAME = re.compile(r"\w{1,90}")
"""Names of states that the header of a checkpoint's file allows."""


Unit = Literal["element", "weight", "model"]


class TriedOptimizer(Part):
    """What a trial found out about an optimizer of a user's own."""

    unit: Unit
    """What its update may be computed from: single elements, whole weights, or all weights together."""
    deviation: float
    """Largest difference that flat parts of weights make: of weights, relative to their movement, or of a number of a
    group, relative to itself."""
    states: dict[str, int] = Field(default_factory=dict)
    """State with the shape of its weight → bytes of an element."""
    scalars: Many[str] = ()
    """States that are numbers: one for each tensor."""
    others: Many[str] = ()
    """States of other shapes."""
    group_numbers: dict[str, str] = Field(default_factory=dict)
    """Number that it keeps in its parameter groups → `bool`, `int`, `float`, or the dtype of a tensor with one
    element."""
    decays: bool = True
    """Whether it has a `weight_decay`."""
    averages: bool = False
    """Whether its `eval()` puts averaged weights into the model, and `train()` the trained ones again."""

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
    path, folder = request["optimizer"], request["folder"]
    tried = _Trial(path, folder, request["options"]).result()
    code = identified({path.partition(":")[0].partition(".")[0]}, folder)
    return _Cached(code=code, tried=tried).model_dump()


def build(
    groups: list[dict[str, Any]], path: str, options: Mapping[str, Any], rate: float, folder: str | None
) -> Optimizer:
    """Returns the optimizer that a class or function makes for parameter groups.

    It is ready to train. groups: with `params` and `weight_decay`. path: that of the class or function; options: its
    arguments. rate: `lr`. Raises RecipeError if it cannot be built, or has other groups than these.
    """
    from torch.optim import Optimizer

    kind = import_object(path, folder, FIELD)
    if isinstance(kind, type) and not issubclass(kind, Optimizer):
        raise _refusal("code.kind", f"{path} is {format_value(kind)}, not a subclass of torch.optim.Optimizer")
    given = [([id(weight) for weight in group["params"]], group["weight_decay"]) for group in groups]
    with own_code_errors(path, folder, FIELD, "cannot be built"):
        optimizer = kind(groups, lr=rate, **options)
    if not isinstance(optimizer, Optimizer):
        message = f"{path} returns {format_value(optimizer)}, whose class is no subclass of torch.optim.Optimizer"
        raise _refusal("code.kind", f"{message}: one that wraps an optimizer is not supported")
    if taken := [name for name in RESERVED if hasattr(optimizer, name)]:
        message = f"{path} has an attribute {' and '.join(taken)}, which llmtrain uses otherwise: choose another name"
        raise _refusal("code.optimizer", message)
    found = [
        ([id(weight) for weight in group["params"]], group.get("weight_decay")) for group in optimizer.param_groups
    ]
    if [weights for weights, _ in found] != [weights for weights, _ in given]:
        message = f"{path} has other parameter groups than it got: {_counts(found)} weights instead of {_counts(given)}"
        raise _refusal("code.optimizer", f"{message}; checkpoints and schedules rely on these groups")
    if "lr" not in optimizer.defaults:
        message = f"{path} has no `lr` in its defaults, so no schedule could set its learning rate"
        raise _refusal("code.optimizer", message)
    if any(group["lr"] != rate for group in optimizer.param_groups):
        raise _refusal("code.optimizer", f"{path} sets `lr` of its groups to other values than it got: use optim.lr")
    if [decay for _, decay in found] != [decay for _, decay in given]:
        message = f"{path} sets `weight_decay` of its groups to other values than it got: use optim.weight_decay"
        raise _refusal("code.optimizer", message)
    switch_to("train", optimizer, path, folder)
    return optimizer


def averages(optimizer: Any) -> bool:
    """Whether an optimizer has `train` and `eval`, as schedule-free ones have."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def switch_to(mode: str, optimizer: Any, path: str, folder: str | None) -> None:
    """Calls `train` or `eval` of an optimizer that has both. path, folder: for errors."""
    import torch

    if averages(optimizer):
        with torch.no_grad(), own_code_errors(path, folder, FIELD, f"fails in {mode}()"):
            getattr(optimizer, mode)()


def _counts(groups: list[tuple[list[int], Any]]) -> str:
    return " + ".join(str(len(weights)) for weights, _ in groups)


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a parameter group that the recipe does not determine, also tensors with one element."""
    return {name: value for name, value in group.items() if name not in SCHEDULED and is_number(value)}


def is_number(value: Any) -> bool:
    """Whether a value is a number or a tensor with one element."""
    return isinstance(value, bool | int | float) or getattr(value, "numel", lambda: 0)() == 1


def type_of(number: Any) -> str:
    """Returns the type of a number, as in `TriedOptimizer.group_numbers`."""
    if hasattr(number, "numel"):
        return str(number.dtype).removeprefix("torch.")
    return next(kind.__name__ for kind in (bool, int, float) if isinstance(number, kind))


def copied(value: Any) -> Any:
    """Returns a value that changes of a tensor do not reach."""
    clone: Callable[[], Any] | None = getattr(value, "clone", None)
    return clone() if clone else value


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


class _Group(dict[str, Any]):
    """A parameter group that notes which entries are set."""

    def __init__(self, group: dict[str, Any]) -> None:
        """Copies the numbers, so that no tensor is one of two groups, as after loading a checkpoint."""
        super().__init__(group | {name: copied(value) for name, value in numbers_of(group).items()})
        self.first = {name: copied(value) for name, value in numbers_of(group).items()}
        self.written: set[str] = set()

    def __setitem__(self, name: str, value: Any) -> None:
        self.written.add(name)
        super().__setitem__(name, value)

    def kept(self) -> dict[str, Any]:
        """Returns the numbers that were set, or have changed."""
        return {
            name: value
            for name, value in numbers_of(self).items()
            if name in self.written or name not in self.first or value != self.first[name]
        }


@dataclass
class _Run:
    """Groups that were trained for some steps."""

    weights: list[Tensor]
    optimizers: list[Optimizer] = field(default_factory=list)
    divisions: Division = field(default_factory=list)
    averaged: list[Tensor] | None = None

    @property
    def groups(self) -> list[list[_Group]]:
        """The groups of each object."""
        return [optimizer.param_groups for optimizer in self.optimizers]  # type: ignore[misc]


class _Trial:
    """Trains the same numbers in several divisions."""

    def __init__(self, path: str, folder: str | None, options: dict[str, Any]) -> None:
        import torch

        self._path, self._folder, self._options = path, folder, options
        generator = torch.Generator().manual_seed(1)
        self._first = [torch.randn(size, generator=generator) * SIZE for size in SIZES]
        # They have a direction in common, as those of a model have: estimates of the distance to go then grow.
        drift = [torch.randn(size, generator=generator) for size in SIZES]
        self._gradients = [
            [mean + torch.randn(mean.shape, generator=generator) for mean in drift] for _ in range(STEPS)
        ]
        self._group_numbers: dict[str, str] = {}

    def result(self) -> TriedOptimizer:
        """Returns what was found. Raises RecipeError for a class that could not be trained with, or continued."""
        optimizer = self._build(_parts(self._first, WHOLE[0]))
        makes_states_at_once = any(optimizer.state.values())
        with own_code_errors(self._path, self._folder, FIELD, "fails in a step"):
            whole = self._train(WHOLE)
        self._check_movement(whole)
        kept = self._kept(whole.optimizers[0])
        self._group_numbers = self._numbers_kept(whole)
        if self._deviation(self._train(WHOLE, as_built=True), whole) > MAX_DEVIATION:
            message = f"{self._path} trains other weights when it is run again, or shares a tensor between its groups"
            raise _refusal("code.repeats", message)
        self._check_continuation(whole)
        deviation = math.inf if makes_states_at_once else self._try(FLAT, whole)
        is_elementwise = deviation <= MAX_DEVIATION and not kept["others"]
        by_weight = self._try(SEPARATE, whole) <= MAX_DEVIATION
        unit: Unit = "element" if is_elementwise else "weight" if by_weight else "model"
        return TriedOptimizer(
            unit=unit,
            deviation=min(deviation, 1e9),
            group_numbers=self._group_numbers,
            decays="weight_decay" in optimizer.defaults,
            averages=averages(optimizer),
            **kept,
        )

    def _build(self, groups: Sequence[Sequence[Tensor]], as_built: bool = False) -> Optimizer:
        from torch import nn

        given: list[dict[str, Any]] = [
            {"params": [nn.Parameter(tensor) for tensor in group], "weight_decay": decay}
            for group, decay in zip(groups, (DECAY, 0.0), strict=True)
        ]
        optimizer = build(given, self._path, self._options, RATE, self._folder)
        if not as_built:
            optimizer.param_groups = [_Group(group) for group in optimizer.param_groups]
        return optimizer

    def _check_movement(self, run: _Run) -> None:
        if not all(bool(weights.isfinite().all()) for weights in run.weights):
            raise _refusal("code.optimizer", f"{self._path} trained weights that are not finite")
        if not self._movement(run):
            raise _refusal("code.optimizer", f"{self._path} changed no weight")

    def _train(
        self,
        division: Division,
        steps: int = STEPS,
        after: _Run | None = None,
        rate: float = RATE,
        as_built: bool = False,
    ) -> _Run:
        """Trains for some steps.

        after: a run of one object from whose states this one continues. as_built: whether the object keeps its own
        parameter groups, instead of a `_Group` for each.
        """
        done = 0 if after is None else STEPS - steps
        run = _Run([group.clone() for group in (after.weights if after else self._first)])
        for groups in division:
            optimizer = self._build(_parts(run.weights, groups), as_built)
            run.divisions.append(groups)
            if after is not None:
                self._copy_states(after.optimizers[0], optimizer)
            for step in range(done, done + steps):
                self._step(optimizer, groups, step, rate, by_group=division is FLAT)
            _write(optimizer, groups, run.weights)
            run.optimizers.append(optimizer)
        return run

    def _averaged(self, run: _Run) -> list[Tensor]:
        """Returns the weights of evaluations. Raises RecipeError if states are other ones after them."""
        if run.averaged is None:
            run.averaged = [group.clone() for group in run.weights]
            for optimizer, groups in zip(run.optimizers, run.divisions, strict=True):
                before = _states(optimizer)
                switch_to("eval", optimizer, self._path, self._folder)
                _write(optimizer, groups, run.averaged)
                switch_to("train", optimizer, self._path, self._folder)
                if any(float((a - b).abs().max()) for a, b in zip(before, _states(optimizer), strict=True)):
                    message = f"{self._path} has other states after eval() and train() than before"
                    raise _refusal("code.state", f"{message}, so evaluations would change the run")
        return run.averaged

    def _step(self, optimizer: Optimizer, groups: list[list[Piece]], step: int, rate: float, by_group: bool) -> None:
        """by_group: whether to update one group after the other, as ZeRO does."""
        for pieces, group, gradients in zip(groups, optimizer.param_groups, self._gradients[step], strict=True):
            group["lr"] = rate * (1 - step / (2 * STEPS))  # as a schedule does
            for (first, shape), parameter in zip(pieces, group["params"], strict=True):
                parameter.grad = gradients[first : first + math.prod(shape)].view(shape).clone()
        every = optimizer.param_groups
        for chosen in [[group] for group in every] if by_group else [every]:
            optimizer.param_groups = chosen
            optimizer.step()
        optimizer.param_groups = every

    def _copy_states(self, source: Optimizer, target: Optimizer) -> None:
        for old, new in zip(_parameters(source), _parameters(target), strict=True):
            state = source.state.get(old, {})
            target.state[new] = {name: copied(value) for name, value in state.items()}
        for old_group, new_group in zip(source.param_groups, target.param_groups, strict=True):
            new_group |= {name: copied(old_group[name]) for name in self._group_numbers if name in old_group}

    def _numbers_kept(self, whole: _Run) -> dict[str, str]:
        """Returns `TriedOptimizer.group_numbers`. Raises RecipeError if they begin differently in the groups."""
        runs = [whole]
        with suppress(Exception):  # such a rate may be too large
            runs.append(self._train(WHOLE, rate=LARGE_RATE))
        kept: dict[str, Any] = {}
        for group in (group for run in runs for group in run.groups[0]):
            kept |= group.kept()
        for name in kept:
            self._check_name(name)
            first, *others = (group.first.get(name) for group in whole.groups[0])
            if any(other != first for other in others):
                message = f"{self._path} changes {format_value(name)} of `param_groups`, which begins with other values"
                raise _refusal("code.state", f"{message} in each group; a checkpoint could not hold it")
        return {name: type_of(value) for name, value in kept.items()}

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
                self._check_name(name)
                if isinstance(value, torch.Tensor) and value.numel() > 1 and not value.is_floating_point():
                    message = f"{self._path} keeps {format_value(name)} as {value.dtype}"
                    raise _refusal("code.state", f"{message}; checkpoints hold states of floating point only")
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    states[name] = value.element_size()
                elif is_number(value):
                    scalars[name] = None
                elif isinstance(value, torch.Tensor):
                    others[name] = None
                else:
                    what = f"{format_value(name)}, a value of type {type(value).__name__}"
                    message = f"{self._path} keeps the state {what}, which is neither a tensor nor a number"
                    raise _refusal("code.state", f"{message}; a checkpoint could not hold it")
        return {"states": states, "scalars": tuple(scalars), "others": tuple(others)}

    def _check_name(self, name: Any) -> None:
        if not (isinstance(name, str) and _NAME.fullmatch(name)) or name == WEIGHT or name.endswith((CODE, SCALE)):
            message = f"{self._path} keeps a state under the name {format_value(name)}"
            raise _refusal("code.state", f"{message}, which the files of checkpoints use otherwise, or not at all")

    def _check_continuation(self, whole: _Run) -> None:
        """Raises RecipeError if a new object with the same states trains other weights."""
        half = self._train(WHOLE, STEPS // 2)
        with own_code_errors(self._path, self._folder, FIELD, "fails to continue from its own states"):
            continued = self._train(WHOLE, STEPS - STEPS // 2, half)
        deviation = self._deviation(continued, whole)
        if deviation > MAX_DEVIATION:
            message = (
                f"{self._path} keeps something outside `state[parameter]` and the numbers of `param_groups`, which a "
                "checkpoint could not hold: with the same states, a new object trains other weights, by "
                f"{deviation:.0%} of their movement"
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
        of_weights = max(float((a - b).abs().max()) for a, b in pairs) / self._movement(other)
        of_numbers = [
            _difference(group.get(name), expected.get(name))
            for groups in run.groups
            for group, expected in zip(groups, other.groups[0], strict=True)
            for name in self._group_numbers
        ]
        pairs = zip(self._averaged(run), self._averaged(other), strict=True)
        of_averages = max(float((a - b).abs().max()) for a, b in pairs) / self._movement(other)
        return max(value if math.isfinite(value) else math.inf for value in (of_weights, of_averages, *of_numbers))

    def _movement(self, run: _Run) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(run.weights, self._first, strict=True))


def _parts(weights: list[Tensor], groups: list[list[Piece]]) -> list[list[Tensor]]:
    """Returns copies of the pieces of each group."""
    return [
        [group[first : first + math.prod(shape)].view(shape).clone() for first, shape in pieces]
        for group, pieces in zip(weights, groups, strict=True)
    ]


def _write(optimizer: Optimizer, groups: list[list[Piece]], weights: list[Tensor]) -> None:
    """Writes the pieces that an object holds to their places."""
    for target, pieces, group in zip(weights, groups, optimizer.param_groups, strict=True):
        for (first, shape), parameter in zip(pieces, group["params"], strict=True):
            target[first : first + math.prod(shape)] = parameter.detach().flatten()


def _states(optimizer: Optimizer) -> list[Tensor]:
    """Returns copies of the tensors among the states."""
    states = (state for parameter in _parameters(optimizer) for state in optimizer.state[parameter].values())
    return [state.clone() for state in states if hasattr(state, "clone")]


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _difference(value: Any, expected: Any) -> float:
    """Returns the difference of two numbers, relative to the larger one; infinite if one of them is missing."""
    if not (is_number(value) and is_number(expected)):
        return 0.0 if value is expected else math.inf
    first, second = float(value), float(expected)
    return 0.0 if first == second else abs(first - second) / max(abs(first), abs(second))
