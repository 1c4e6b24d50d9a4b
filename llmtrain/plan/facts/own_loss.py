"""Tries a user's own loss on small random input. What would depend on how a run is divided is refused.

Ranks and micro-batches hold different units, and different numbers of them. Their sums, divided by the number of items
of the global batch, only give its mean if the loss of all units is the sum of the losses of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from llmtrain.errors import Problem, RecipeError, format_value
from llmtrain.recipe import ObjectiveConfig
from llmtrain.recipe.own_code import definition_line, import_object, own_code_errors

if TYPE_CHECKING:
    import torch

FIELD = "objective.name"
NO_TARGET = -100
LENGTHS = (6, 3, 5, 2)
"""Tokens of the rows of the random input."""
TRIALS = 3
WIDTH = 16
"""Of hidden states."""
TOLERANCE = 1e-4
"""Relative. A sum over the rows in another order deviates by some 1e-7, an operation that loses three digits by 1e-4;
to divide by another count, or to mix rows, changes a sum by a share of a row, which is several percent."""
RESERVED = frozenset(
    (
        *("step", "time", "loss", "grad_norm", "lr", "tokens", "samples", "step_time_s", "tokens_per_second"),
        *(
            "tokens_per_second_per_device",
            "tflops_per_device",
            "mfu",
            "peak_memory_bytes",
            "data_wait_s",
            "save_blocked_s",
            "skipped_steps",
        ),
        *("rollbacks", "left_s", "device_hours", "cost", "cost_at_end", "slowest_rank", "slowest_ratio"),
        *("router_loss", "expert_load", "eval_loss", "eval_loss_by_source", "perplexity", "bits_per_byte"),
    )
)
"""Names of the other metrics of a run, which a metric of the user's own cannot have."""

Sums = dict[str, tuple[Any, Any]]
"""The sum and the count of the loss, and of each further metric, by name."""


@dataclass(frozen=True)
class _Result:
    """What a loss returns for some rows."""

    sums: dict[str, tuple[float, float]]
    gradient: torch.Tensor
    """As the logits, [rows, length, outputs], or the hidden states, [rows, length, width]."""
    weight_gradient: torch.Tensor
    """Of the head's weight, [outputs, width]; of no element if the loss gets logits."""


class Sizes(NamedTuple):
    """The sizes of what a loss is given."""

    vocabulary: int
    """Labels are smaller."""
    outputs: int
    """Logits of a token: one for each token of the vocabulary, or those of another head (`model.num_labels`)."""


@dataclass(frozen=True)
class _Input:
    """What a loss is given."""

    outputs: torch.Tensor
    """Logits, or hidden states."""
    labels: torch.Tensor
    columns: dict[str, torch.Tensor]
    """Each of `objective.columns`: [rows], or [rows, length] for tokens."""

    def part(self, rows: slice, tokens: slice) -> _Input:
        """Returns some tokens of some rows."""
        columns = {
            name: drawn[rows, tokens] if drawn.ndim == 2 else drawn[rows] for name, drawn in self.columns.items()
        }
        return _Input(self.outputs[rows, tokens], self.labels[rows, tokens], columns)


class _FaultError(Exception):
    """What is wrong with a loss, in words that follow its import path."""


def sums_of(result: Any) -> Sums:
    """Returns the sums and counts in the result of a user's own loss. Raises ValueError for anything else."""
    sums = result if isinstance(result, Mapping) else {"loss": result}
    if "loss" not in sums:
        raise ValueError(f"returns a dictionary without 'loss', but with {', '.join(map(str, sums))}")
    for name, pair in sums.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"returns {type(pair).__name__} as {name!r} instead of a sum and a count")
    return {str(name): (pair[0], pair[1]) for name, pair in sums.items()}


def own_metrics(objective: ObjectiveConfig, folder: str | None, sizes: Sizes) -> tuple[str, ...]:
    """Returns the names of the metrics that a user's own loss returns next to the loss.

    folder: of the recipe's own modules.
    """
    trial = _Trial(objective, folder, sizes)
    with trial.refusing():
        return tuple(name for name in trial.run(next(trial.random_inputs())).sums if name != "loss")


def check_loss(objective: ObjectiveConfig, folder: str | None, sizes: Sizes) -> None:
    """Raises RecipeError, with file and line, for a loss or a count that cannot be divided among ranks.

    Arguments as for `own_metrics`.
    """
    trial = _Trial(objective, folder, sizes)
    with trial.refusing():
        for given in trial.random_inputs():
            trial.check(given)


@dataclass(frozen=True)
class _Trial:
    """Calls of a user's own loss. Methods raise _FaultError, or RecipeError if the user's code raises an exception."""

    objective: ObjectiveConfig
    folder: str | None
    sizes: Sizes

    @cached_property
    def loss(self) -> Callable[..., Any]:
        """The user's function."""
        loss: Callable[..., Any] = import_object(self.objective.name, self.folder, FIELD)
        return loss

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Makes a _FaultError a RecipeError, and restores the state of torch's random numbers."""
        import torch

        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                yield
        except _FaultError as fault:
            message = f"{definition_line(self.loss)}{self.objective.name} {fault}"
            raise RecipeError(Problem("code.loss", FIELD, message)) from None

    def random_inputs(self) -> Iterator[_Input]:
        """Yields random input; half of the labels are tokens that the options name, if they name any."""
        import torch

        vocabulary = self.sizes.vocabulary
        named = [token for token in integers(self.objective.options) if 0 <= token < vocabulary]
        shape = (len(LENGTHS), max(LENGTHS))
        for _ in range(TRIALS):
            labels = torch.randint(vocabulary, shape)
            if named:
                drawn = torch.tensor(named)[torch.randint(len(named), shape)]
                labels = torch.where(torch.rand(shape) < 0.5, drawn, labels)
            columns, lengths = torch.arange(shape[1]), torch.tensor(LENGTHS)[:, None]
            # Each row begins with a token without a target, as a prompt has none, and ends with a target.
            labels[(columns == 0) | (columns >= lengths)] = NO_TARGET
            width = WIDTH if self.objective.hidden_states else self.sizes.outputs
            yield _Input(2 * torch.randn(*shape, width), labels, self._random_columns())

    @cached_property
    def weight(self) -> torch.Tensor:
        """The weight of a head, [outputs, width]."""
        import torch

        drawn = torch.randn(self.sizes.outputs, WIDTH, generator=torch.Generator().manual_seed(0))
        return drawn / math.sqrt(WIDTH)

    def _random_columns(self) -> dict[str, torch.Tensor]:
        """Returns columns of numbers from 0.1 to 1, half of them 1: a class, a weight or a score may be such.

        The rows of a pair have the same number.
        """
        import torch

        columns = {}
        for name in self.objective.columns:
            drawn = 1 - 0.9 * torch.rand(len(LENGTHS)) * (torch.rand(len(LENGTHS)) < 0.5)
            if self.objective.unit == "pair":
                drawn[1::2] = drawn[0::2]
            of_tokens = self.objective.unit == "token"
            columns[name] = drawn[:, None].repeat(1, max(LENGTHS)) if of_tokens else drawn
        return columns

    def run(self, given: _Input) -> _Result:
        """Returns what the loss returns, and its gradient."""
        import torch

        objective, what = self.objective, "hidden states" if self.objective.hidden_states else "logits"
        leaf = given.outputs.detach().clone().requires_grad_()
        weight = self.weight.clone().requires_grad_() if objective.hidden_states else leaf.new_zeros(0).requires_grad_()
        tensors = (leaf, weight) if objective.hidden_states else (leaf,)
        with own_code_errors(objective.name, self.folder, FIELD, f"fails for {what} {list(leaf.shape)}"):
            result = self.loss(*tensors, given.labels.clone(), **given.columns, **objective.options)
        try:
            sums = sums_of(result)
        except ValueError as error:
            raise _FaultError(str(error)) from None
        numbers = {name: (_number(name, total), _number(name, count)) for name, (total, count) in sums.items()}
        total = sums["loss"][0]
        if not isinstance(total, torch.Tensor) or not total.requires_grad:
            raise _FaultError(f"returns a sum that does not depend on the {what}, so that nothing can be trained")
        with own_code_errors(objective.name, self.folder, FIELD, "fails in its backward pass"):
            found = torch.autograd.grad(total, (leaf, weight), allow_unused=True, materialize_grads=True)
        if not all(torch.isfinite(gradient).all() for gradient in found):
            raise _FaultError("has a gradient that is not finite")
        return _Result(numbers, *found)

    def check(self, given: _Input) -> None:
        """Compares the loss of several rows with those of each."""
        import torch

        whole, rows = self.run(given), 2 if self.objective.unit == "pair" else 1
        self._check_count(whole, given)
        firsts = range(0, len(LENGTHS), rows)
        parts = [(slice(first, first + rows), slice(max(LENGTHS[first : first + rows]))) for first in firsts]
        alone = [self.run(given.part(*part)) for part in parts]
        of = "pair" if rows == 2 else "row"
        _check_sums(whole, alone, f"the {len(alone)} {of}s", f"each {of} alone, without its padding")
        for part, result in zip(parts, alone, strict=True):
            self._check_count(result, given.part(*part))
            _check_gradient(whole.gradient[part], result.gradient, f"each {of} alone")
        of_weight = torch.stack([result.weight_gradient for result in alone]).sum(0)
        _check_gradient(whole.weight_gradient, of_weight, f"each {of} alone")
        if whole.gradient[_is_padding(given.labels)].any():
            raise _FaultError("has a gradient at the padding of a row, whose labels are negative")
        if self.objective.unit == "token":
            self._check_tokens(whole, given)

    def _check_tokens(self, whole: _Result, given: _Input) -> None:
        """Checks what only a sum over tokens must be: rows may be divided anywhere, or have no target."""
        half = given.labels.shape[1] // 2
        parts = [self.run(given.part(slice(None), tokens)) for tokens in (slice(half), slice(half, None))]
        _check_sums(whole, parts, "the rows", "their left and right halves, which may be on different ranks")
        none = self.run(replace(given, labels=given.labels.new_full(given.labels.shape, NO_TARGET)))
        for name, (total, count) in none.sums.items():
            if total or count:
                what = f"returns the sum {total:.4g} and the count {count:.4g}"
                raise _FaultError(f"{what} as {name!r} for rows without targets, instead of 0 and 0")

    def _check_count(self, result: _Result, given: _Input) -> None:
        """Compares the count that the loss returns with the one that is known beforehand."""
        objective, found, labels = self.objective, result.sums["loss"][1], given.labels
        if objective.count is None:
            targets = int((labels >= 0).sum())
            known = {"token": targets, "document": len(labels), "pair": len(labels) // 2}[objective.unit]
            source = f"with objective.unit={objective.unit}"
        else:
            count = import_object(objective.count, self.folder, "objective.count")
            with own_code_errors(objective.count, self.folder, "objective.count", "fails"):
                known = int(count(labels.clone(), **given.columns, **objective.options))
            source = f"by {objective.count}"
        if found != known:
            raise _FaultError(
                f"returns the count {found:g} for labels {list(labels.shape)}, which have {known} items {source}"
            )


def integers(value: Any) -> Iterator[int]:
    """Yields the integers in a value of a recipe."""
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from integers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _is_padding(labels: torch.Tensor) -> torch.Tensor:
    """Returns whether each position is after the last target of its row, [rows, length]."""
    return (labels >= 0).flip(1).cumsum(1).flip(1) == 0


def _number(name: str, value: Any) -> float:
    """Returns a sum or a count as a number."""
    import torch

    if name != "loss" and (not name.isidentifier() or name in RESERVED):
        raise _FaultError(f"returns a metric {format_value(name)}; use another word, which no metric of a run has")
    shape = list(value.shape) if isinstance(value, torch.Tensor) else []
    if shape or not isinstance(value, torch.Tensor | int | float):
        what = f"a tensor {shape}" if shape else type(value).__name__
        raise _FaultError(f"returns {what} as a sum or count of {name!r}, which must be a number")
    number = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
    if not math.isfinite(number):
        raise _FaultError(f"returns {number} as a sum or count of {name!r}")
    return number


def _check_sums(whole: _Result, parts: list[_Result], what: str, of: str) -> None:
    for name in whole.sums:
        for index, number in enumerate(("sum", "count")):
            if any(part.sums.keys() != whole.sums.keys() for part in parts):
                raise _FaultError("does not return the same metrics for all rows")
            values = [part.sums[name][index] for part in parts]
            total, expected = whole.sums[name][index], sum(values)
            scale = max(sum(map(abs, values)), abs(total))
            if abs(total - expected) > TOLERANCE * scale:
                raise _FaultError(
                    f"is not a sum over its rows: as {name!r} it returns the {number} {total:.6g} for {what}, but "
                    f"{expected:.6g} in total for {of} (a deviation of {abs(total - expected) / scale:.1%}). It must "
                    "not divide by a count, nor let rows depend on each other"
                )


def _check_gradient(whole: torch.Tensor, part: torch.Tensor, of: str) -> None:
    if not whole.numel():
        return
    largest = max(whole.abs().max().item(), part.abs().max().item())
    deviation = (whole - part).abs().max().item()
    if deviation > TOLERANCE * largest:
        raise _FaultError(
            f"is not a sum over its rows: its gradient differs from that of {of} by {deviation / largest:.1%} of the "
            "largest value"
        )
