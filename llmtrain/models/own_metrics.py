"""Metrics of the user's own (`evaluation.metrics`): sums over the target tokens of evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmtrain.plan.facts.own_metrics import field_of, pair_of
from llmtrain.plan.kernels import CHUNK_TOKENS
from llmtrain.recipe import Recipe
from llmtrain.recipe.own_code import import_object, own_code_errors


class OwnMetrics:
    """The user's functions, with their sums and counts since the last `begin`."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises RecipeError if a function cannot be imported."""
        self._paths, self._folder = recipe.evaluation.metrics, recipe.code_dir
        self._functions: dict[str, Callable[..., Any]] = {
            name: import_object(path, recipe.code_dir, field_of(name)) for name, path in self._paths.items()
        }
        self.begin()

    def begin(self) -> None:
        """Forgets what has been seen so far."""
        self._seen: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Adds the sums of some tokens. A function is never called for more than a chunk of them, nor for none.

        logits: [..., outputs], of any precision; labels: [...], negative at positions without a target.
        """
        for of_chunk, labels_of_chunk in _chunks(logits, labels):
            kept = labels_of_chunk >= 0
            if len(targets := labels_of_chunk[kept]):
                self._seen.append(self._sums(of_chunk[kept].float(), targets))

    def add_hidden(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
        """Does the same, given hidden states [..., width] and the weight of the head [outputs, width]."""
        for of_chunk, labels_of_chunk in _chunks(hidden, labels):
            self.add(torch.nn.functional.linear(of_chunk.to(weight.dtype), weight), labels_of_chunk)

    def _sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        numbers: list[Any] = []
        for name, function in self._functions.items():
            action = f"fails for logits {list(logits.shape)}"
            with (
                torch.autocast(logits.device.type, enabled=False),
                own_code_errors(self._paths[name], self._folder, field_of(name), action),
            ):
                numbers += pair_of(function(logits, labels))
        # In fp64, so that the order of summation does not show in a metric.
        of_device = (torch.as_tensor(number, dtype=torch.float64, device=logits.device) for number in numbers)
        return torch.stack([number.reshape(()) for number in of_device])

    def sums(self, device: torch.device) -> Tensor:
        """Returns this rank's share of the sums that `means` reads: sum and count of each metric; fp64."""
        zeros = torch.zeros(2 * len(self._functions), device=device, dtype=torch.float64)
        return torch.stack([zeros, *(sums.to(device) for sums in self._seen)]).sum(0)

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Returns each metric by name, given `sums` over all ranks; NaN over a count of 0."""
        pairs = zip(sums[0::2], sums[1::2], strict=True)
        means = (total / count if count else math.nan for total, count in pairs)
        return dict(zip(self._functions, means, strict=True))


def _chunks(values: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields chunks of tokens: values [tokens, numbers] and labels [tokens]."""
    of_tokens = (values.flatten(0, -2), labels.flatten())
    return zip(*(torch.split(tensor, CHUNK_TOKENS) for tensor in of_tokens), strict=True)
