"""Tries a user's own metrics of evaluations on small random input, and refuses what would depend on the layout.

Ranks and micro-batches hold different tokens, which are given to a metric in chunks. Its sums and counts only give the
value of a whole evaluation if those of all tokens are the sums of those of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.facts.own_loss import TOLERANCE, TRIALS, Sizes, integers, own_metrics
from llmtrain.recipe import ObjectiveConfig
from llmtrain.recipe.own_code import definition_line, import_object, own_code_errors

if TYPE_CHECKING:
    import torch

TOKENS = 12
"""Tokens of the random input."""
KNOWN_LOGIT = 20.0
"""Added to the logit of the label of half of the tokens, so that these are predicted."""


class _FaultError(Exception):
    """What is wrong with a metric, in words that follow its import path."""


def field_of(name: str) -> str:
    """Returns the dotted field of a metric."""
    return f"evaluation.metrics.{name}"


def pair_of(result: Any) -> tuple[Any, Any]:
    """Returns the sum and the count that a metric has returned. Raises ValueError for anything but two numbers."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(f"returns {_described(result)} instead of a sum and a count")
    total, count = result
    for what, value in (("sum", total), ("count", count)):
        if getattr(value, "shape", ()) or not hasattr(value, "__float__"):
            raise ValueError(f"returns {_described(value)} as its {what}, which must be a number")
    return total, count


def _described(value: Any) -> str:
    shape = getattr(value, "shape", ())
    return f"a tensor {list(shape)}" if shape else type(value).__name__


def check_metrics(metrics: Mapping[str, str], objective: ObjectiveConfig, folder: str | None, sizes: Sizes) -> None:
    """Raises RecipeError, with file and line, for each metric that cannot be summed over tokens, or that has the name
    of a metric of the user's own loss.

    metrics: name → import path. objective: its options name tokens that may be the only labels. folder: of the recipe's
    own modules.
    """
    problems: list[Problem] = []
    of_loss = own_metrics(objective, folder, sizes) if objective.is_own else ()
    for name, path in metrics.items():
        if name in of_loss:
            message = f"is a metric that {objective.name} returns; use another word"
            problems.append(Problem("code.metric", field_of(name), message))
        try:
            _check(path, name, folder, sizes, [*integers(objective.options)])
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)


def _check(path: str, name: str, folder: str | None, sizes: Sizes, named: list[int]) -> None:
    import torch

    function = import_object(path, folder, field_of(name))

    def call(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        with own_code_errors(path, folder, field_of(name), f"fails for logits {list(logits.shape)}"):
            result = function(logits, labels)
        try:
            total, count = (float(number) for number in pair_of(result))
        except ValueError as error:
            raise _FaultError(str(error)) from None
        if not (math.isfinite(total) and math.isfinite(count)):
            raise _FaultError(f"returns the sum {total} and the count {count}")
        return total, count

    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            for _ in range(TRIALS):
                _check_sums(call, *_random_input(sizes, named))
    except _FaultError as fault:
        message = f"{definition_line(function)}{path} {fault}"
        raise RecipeError(Problem("code.metric", field_of(name), message)) from None


def _random_input(sizes: Sizes, named: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits [tokens, outputs] and labels; half of the labels are `named` tokens, if there are any.

    Two neighbours have the same label, and logits that predict it or do not.
    """
    import torch

    labels = torch.randint(sizes.vocabulary, (TOKENS // 2,))
    if choices := [token for token in named if 0 <= token < sizes.vocabulary]:
        labels[::2] = torch.tensor(choices)[torch.randint(len(choices), (len(labels[::2]),))]
    labels = labels.repeat_interleave(2)
    logits = 2 * torch.randn(TOKENS, sizes.outputs)
    known = [token for token in range(TOKENS) if token % 4 < 2 and labels[token] < sizes.outputs]
    logits[known, labels[known]] += KNOWN_LOGIT
    return logits, labels


def _check_sums(
    call: Callable[[torch.Tensor, torch.Tensor], tuple[float, float]], logits: torch.Tensor, labels: torch.Tensor
) -> None:
    """Compares the sum and the count of several tokens with those of each."""
    import torch

    given, state = (logits.clone(), labels.clone()), torch.get_rng_state()
    whole = call(*given)
    if not (torch.equal(given[0], logits) and torch.equal(given[1], labels)):
        raise _FaultError("changes the logits or the labels, which other metrics read after it")
    if not torch.equal(torch.get_rng_state(), state):
        raise _FaultError("draws random numbers, so that its value depends on how a run is divided")
    alone = [call(logits[[token]], labels[[token]]) for token in range(len(labels))]
    for number, total, of_each in zip(("sum", "count"), whole, zip(*alone, strict=True), strict=True):
        scale = max(sum(map(abs, of_each)), abs(total))
        if abs(total - sum(of_each)) > TOLERANCE * scale:
            raise _FaultError(
                f"is not a sum over tokens: it returns the {number} {total:.6g} for {len(labels)} tokens, but "
                f"{sum(of_each):.6g} in total for each of them alone. It must not divide by a count, nor let tokens "
                "depend on each other"
            )
