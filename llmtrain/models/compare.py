"""What a tiny model computes with other kernels, against what it computed before."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.models.cut import packed_input
from llmtrain.models.loss import target_loss_sum


@dataclass(frozen=True)
class Computed:
    """A loss, and the gradients of all trained parameters in their order."""

    loss: Tensor
    """Sum of the cross-entropies, and the auxiliary loss of a router."""
    gradients: list[Tensor | None]
    """None where the loss does not depend on a parameter."""


class Comparison:
    """A tiny model on packed documents, each token its own target; its first computation is what others must be."""

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig) -> None:
        self._model = model
        device = next(model.parameters()).device
        self._tokens, self._positions = (one.to(device) for one in packed_input(config))
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._expected = self._compute(takes_targets=False)

    def deviation(self, takes_targets: bool = False) -> float:
        """Largest deviation of the loss, and of a gradient relative to the largest, as the model computes now.

        takes_targets: whether the model makes the loss itself (`ChunkedLoss`). Infinite where a gradient is lost, or
        a number is no number.
        """
        found, expected = self._compute(takes_targets), self._expected
        worst = _larger(0.0, abs(float(found.loss.detach()) / float(expected.loss.detach()) - 1))
        largest = max(float(one.abs().max()) for one in expected.gradients if one is not None)
        for one, other in zip(found.gradients, expected.gradients, strict=True):
            if one is not None and other is not None:
                worst = _larger(worst, float((one - other).abs().max()) / largest)
            elif one is not None or other is not None:
                return math.inf
        return worst

    def _compute(self, takes_targets: bool) -> Computed:
        inputs = {"input_ids": self._tokens, "position_ids": self._positions, "use_cache": False}
        if takes_targets:
            output = self._model(**inputs, targets=self._tokens)
            loss = output.loss_sum
        else:
            output = self._model(**inputs)
            loss = target_loss_sum(output.logits, self._tokens)
        auxiliary = getattr(output, "aux_loss", None)
        if auxiliary is not None:
            loss = loss + auxiliary
        return Computed(loss, list(torch.autograd.grad(loss, self._trained, allow_unused=True)))


def _larger(one: float, other: float) -> float:
    """Python's own maximum drops what is not a number."""
    return max(one, other) if math.isfinite(other) else math.inf
