"""Compares what a tiny model computes on packed documents before and after a change of it, in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.models.loss import target_loss_sum
from llmtrain.models.tiny.configuration import LAYERS, shrink_configuration
from llmtrain.models.tiny.model import CPU, build_tiny_model, packed_input, relative_deviation

SUM_TOLERANCE = 1e-5
"""Largest allowed deviation, if the same terms are summed in another order, of a loss or a logit relative to the
largest one, and of a gradient relative to the largest gradient.

Sums of some hundred fp32 products then deviate by a few 2⁻²⁴ in each of a few layers. A term that is omitted or counted
twice causes a deviation of at least half its size.
"""


class Outcome(NamedTuple):
    """What a model computes."""

    output: Tensor
    """Its logits, or its loss."""
    gradients: Mapping[str, Tensor | None]
    """By name, the gradient of each trained parameter; None if there is none."""


class Deviation(NamedTuple):
    """How far one outcome differs from another; infinite if a gradient is missing or a value is not finite."""

    output: float
    """Largest deviation of the output, relative to its largest value."""
    gradient: float
    """Largest deviation of a gradient, relative to the largest value of all gradients."""
    parameter: str
    """Name of the parameter with that gradient."""


def logits_outcome(model: PreTrainedModel, logits: Tensor, auxiliary: Tensor | None, zeros: bool = False) -> Outcome:
    """Returns logits with the gradients of their mean, in which each has another weight, plus the auxiliary loss.

    zeros: whether a parameter without a gradient has one of zeros.
    """
    weights = torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)
    total = (logits * weights).mean()
    total = total if auxiliary is None else total + auxiliary
    return Outcome(logits.detach(), _gradients(model, total, zeros))


def loss_outcome(model: PreTrainedModel, takes_targets: bool = False) -> Outcome:
    """Returns the loss of packed documents, in which each token is its own target, and its gradients.

    The loss is the sum of the cross-entropies and of a router's loss. takes_targets: whether the model computes it
    itself (`ChunkedLoss`).
    """
    tokens, positions = (tensor.to(next(model.parameters()).device) for tensor in packed_input(model.config))
    targets = {"targets": tokens} if takes_targets else {}
    output = model(input_ids=tokens, position_ids=positions, use_cache=False, **targets)
    loss = output.loss_sum if takes_targets else target_loss_sum(output.logits, tokens)
    auxiliary = getattr(output, "aux_loss", None)
    loss = loss if auxiliary is None else loss + auxiliary
    return Outcome(loss.detach(), _gradients(model, loss))


def deviation(ours: Outcome, expected: Outcome) -> Deviation:
    """Returns how far `ours` differs from `expected`."""
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values() if gradient is not None)
    worst, name = max(
        (_deviation_of_gradient(ours.gradients[name], gradient, largest), name)
        for name, gradient in expected.gradients.items()
    )
    return Deviation(relative_deviation(ours.output, expected.output), worst, name)


def deviation_of(
    change: Callable[[PreTrainedModel], object],
    config: PreTrainedConfig,
    device: torch.device = CPU,
    takes_targets: bool = False,
) -> float:
    """Returns the largest deviation of the loss and gradients of a tiny copy of a model after a change of it."""
    with torch.random.fork_rng(devices=[]):  # initialized on the CPU
        model = build_tiny_model(shrink_configuration(config, LAYERS), "eager").to(device)
        expected = loss_outcome(model)
        change(model)
        changed = deviation(loss_outcome(model, takes_targets), expected)
    return max(changed.output, changed.gradient)


def _gradients(model: PreTrainedModel, total: Tensor, zeros: bool = False) -> dict[str, Tensor | None]:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True, materialize_grads=zeros)
    return dict(zip(trained, gradients, strict=True))


def _deviation_of_gradient(ours: Tensor | None, expected: Tensor | None, largest: float) -> float:
    if ours is None and expected is None:
        return 0.0
    if ours is None or expected is None or ours.shape != expected.shape:
        return math.inf
    difference = float((ours - expected).abs().max()) / largest if expected.numel() else 0.0
    return difference if math.isfinite(difference) else math.inf
