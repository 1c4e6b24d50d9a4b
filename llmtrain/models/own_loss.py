"""A loss of the user's own (`objective.name`): the sum of a micro-batch's losses, which the caller divides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmtrain.data import NO_TARGET, Documents, MicroBatch
from llmtrain.data.items import column_arguments, document_rows, document_values, documents_with_targets
from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.facts.own_loss import Sizes, own_metrics, sums_of
from llmtrain.recipe import Recipe
from llmtrain.recipe.own_code import import_object, own_code_errors

COUNT_TOLERANCE = 2**-20
"""Relative. Sums over ranks are in fp32, which has integers up to 2²⁴."""


class OwnLoss:
    """A user's own loss, with the sums of its metrics since the last `begin`."""

    needs_divergence = False

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        """vocabulary: rows of the embedding. Raises RecipeError if the loss cannot be imported."""
        self.config = recipe.objective
        self._folder = recipe.code_dir
        self._function: Callable[..., Any] = import_object(self.config.name, recipe.code_dir, "objective.name")
        # All ranks add up the same sums, also those that never call the loss, such as the first stages of a pipeline.
        sizes = Sizes(vocabulary, recipe.model.num_labels or vocabulary)
        self.names = own_metrics(recipe.objective, recipe.code_dir, sizes)
        self.begin()

    def begin(self) -> None:
        """Forgets what has been seen so far."""
        self._seen: list[Tensor] = []

    def __call__(self, logits: Tensor, batch: MicroBatch) -> Tensor:
        """Returns the sum of the losses of a micro-batch, or of a rank's slice of it.

        logits: [batch, T, outputs], of any precision; the loss is computed in fp32.
        """
        return self.take(self.of_batch(batch, logits))

    def of_batch(self, batch: MicroBatch, outputs: Tensor, weight: Tensor | None = None) -> Tensor:
        """Returns the sums of the loss, as `sums`, of a micro-batch, or of a rank's slice of it."""
        labels = batch.labels.to(outputs.device, non_blocking=True)
        values = None if batch.values is None else batch.values.to(outputs.device, non_blocking=True)
        if self.config.unit == "token":
            return self.sums(outputs, labels, values, weight)
        bounds = (batch.documents or Documents.of(batch.position_ids.cpu())).bounds
        kept = documents_with_targets(batch.labels.cpu(), bounds)
        if not any(kept):  # 0, with a gradient of 0
            given = (outputs,) if weight is None else (outputs, weight)
            nothing = torch.stack([tensor.flatten()[:0].float().sum() for tensor in given]).sum()
            return torch.stack([nothing, *nothing.new_zeros(1 + 2 * len(self.names))])
        rows = document_rows(outputs, bounds, kept, 0), document_rows(labels, bounds, kept, NO_TARGET)
        return self.sums(*rows, None if values is None else document_values(values, bounds, kept), weight)

    def sums(
        self, outputs: Tensor, labels: Tensor, values: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """Returns the sum of the losses of some rows, and the sums that `metrics` reads, which have no gradient.

        outputs: logits, or, with the weight of the head, hidden states [rows, length, width]. values: the numbers in
        `objective.columns` of each token [rows, length, columns], or each row [rows, columns]. Sums of rows, or of
        chunks of tokens, may be added.
        """
        given = (outputs.float(),) if weight is None else (outputs.to(weight.dtype), weight)
        action = f"fails for {'logits' if weight is None else 'hidden states'} {list(outputs.shape)}"
        with (
            torch.autocast(outputs.device.type, enabled=False),
            own_code_errors(self.config.name, self._folder, "objective.name", action),
        ):
            columns = column_arguments(self.config, values)
            sums = sums_of(self._function(*given, labels, **columns, **self.config.options))
            loss, count = sums["loss"]
            others = [number for name in self.names for number in sums[name]]
        numbers = (torch.as_tensor(number, device=outputs.device).detach() for number in (count, *others))
        return torch.stack([number.float().reshape(()) for number in (loss, *numbers)])

    def take(self, sums: Tensor) -> Tensor:
        """Returns the sum of the losses in the sums of a micro-batch, and keeps the others."""
        self._seen.append(sums[1:].detach())
        return sums[0]

    def metric_sums(self, device: torch.device) -> Tensor:
        """Returns this rank's share of the sums that `metrics` reads: the loss's count, then sum and count of each."""
        zeros = torch.zeros(1 + 2 * len(self.names), device=device)
        return torch.stack([zeros, *(sums.to(device) for sums in self._seen)]).sum(0)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Returns the mean of each metric, given the sums of `metric_sums` over all ranks; NaN over a count of 0."""
        totals, counts = sums[1::2], sums[2::2]
        pairs = zip(totals, counts, strict=True)
        return dict(zip(self.names, (total / count if count else math.nan for total, count in pairs), strict=True))

    def check_count(self, sums: Sequence[float], num_items: int) -> None:
        """Raises RecipeError if the loss has counted other items than those in the data."""
        if abs(sums[0] - num_items) > COUNT_TOLERANCE * num_items:
            known = self.config.count or f"objective.unit={self.config.unit}"
            message = (
                f"{self.config.name} has counted {sums[0]:,.0f} items in a global batch that has {num_items:,}, "
                f"according to {known}"
            )
            raise RecipeError(Problem("code.count", "objective.name", message))
