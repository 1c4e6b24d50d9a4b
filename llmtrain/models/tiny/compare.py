"""Compares the loss and gradients of a tiny model before and after its kernels are replaced."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.models.loss import target_loss_sum
from llmtrain.models.tiny.configuration import LAYERS, shrink_configuration
from llmtrain.models.tiny.model import CPU, build_tiny_model, packed_input


class Comparison:
    """A tiny model on packed documents, in which each token is its own target.

    The constructor computes the reference results, to which later ones are compared.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        device = next(model.parameters()).device
        self._tokens, self._positions = (tensor.to(device) for tensor in packed_input(model.config))
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._expected = self._compute(takes_targets=False)

    def deviation(self, takes_targets: bool = False) -> float:
        """Computes loss and gradients again, and returns the largest deviation from the reference.

        Deviations of gradients are relative to the largest gradient. The result is infinite if a gradient is missing
        or a value is not finite. takes_targets: whether the model computes the loss itself (`ChunkedLoss`).
        """
        (loss, gradients), (expected_loss, expected) = self._compute(takes_targets), self._expected
        worst = _larger(0.0, abs(float(loss.detach()) / float(expected_loss.detach()) - 1))
        largest = max(float(gradient.abs().max()) for gradient in expected if gradient is not None)
        for gradient, expected_gradient in zip(gradients, expected, strict=True):
            if gradient is not None and expected_gradient is not None:
                worst = _larger(worst, float((gradient - expected_gradient).abs().max()) / largest)
            elif gradient is not None or expected_gradient is not None:
                return math.inf
        return worst

    def _compute(self, takes_targets: bool) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the sum of the cross-entropies and of a router's loss, and its gradients: None where it has none."""
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
        return loss, list(torch.autograd.grad(loss, self._trained, allow_unused=True))


def deviation_of(
    change: Callable[[PreTrainedModel], object],
    config: PreTrainedConfig,
    device: torch.device = CPU,
    takes_targets: bool = False,
) -> float:
    """Returns the deviation of a tiny copy of a model after a change of it, as `Comparison` computes it."""
    with torch.random.fork_rng(devices=[]):  # initialized on the CPU
        model = build_tiny_model(shrink_configuration(config, LAYERS), "eager").to(device)
        comparison = Comparison(model)
        change(model)
        return comparison.deviation(takes_targets)


def _larger(worst: float, deviation: float) -> float:
    """Returns the larger number; infinity if `other` is not finite, because Python's `max` can drop a NaN."""
    return max(worst, deviation) if math.isfinite(deviation) else math.inf
