"""Losses that are functions of labels, columns, and logits or outputs of another head, as a user's own are.

Recipes name them by their import path. Each returns the sum of the losses of all units in its rows and their number,
and such a pair for each further metric. The mean over the global batch is taken by the engines (`docs/extending.md`,
"A loss").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

NO_TARGET = -100
"""Label of a position without a target."""
Sums = dict[str, tuple[Tensor, Tensor]]
"""The sum and the count of the loss and of each metric, by name."""


def z_loss(logits: Tensor, labels: Tensor, weight: float = 1e-4) -> Sums:
    """Returns the cross-entropy plus `weight` · log² Z, which keeps the logits small (arXiv 2204.02311, section 5).

    logits: [rows, length, vocabulary]; labels: [rows, length], negative at positions without a target. Z: the sum of
    the exponentials of a token's logits. Unit: token.
    """
    targets = labels >= 0
    log_z = logits.logsumexp(-1).where(targets, 0)
    entropy, count = _losses(logits, labels).sum(), targets.sum()
    return {
        "loss": (entropy + weight * log_z.square().sum(), count),
        "cross_entropy": (entropy, count),
        "log_z": (log_z.sum(), count),
    }


def focal(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Sums:
    """Returns the cross-entropy of each token times (1 − p)^gamma, where p is its probability (arXiv 1708.02002).

    Tokens that are predicted well thus count less. Arguments as for `z_loss`. Unit: token.
    """
    losses = _losses(logits, labels)
    certain = torch.exp(-losses)
    count = (labels >= 0).sum()
    return {"loss": ((1 - certain).pow(gamma).mul(losses).sum(), count), "cross_entropy": (losses.sum(), count)}


def classification(outputs: Tensor, labels: Tensor, classes: Sequence[int]) -> Sums:
    """Returns the cross-entropy of the outputs of a classifier, at the positions that have a class as target.

    outputs: [rows, length, classes], of `model.num_labels`. classes: a token for each class, in the order of the
    outputs. A document is classified by such a token of its completion, which the model has not read at that position;
    other targets are not trained on. labels: as for `z_loss`. Unit: token, with `classified` as count.
    """
    _check_width(outputs, len(classes))
    matches = labels[..., None] == torch.tensor(classes, device=labels.device)
    known = matches.any(-1)
    numbers = matches.int().argmax(-1).where(known, NO_TARGET)
    right, count = (outputs.argmax(-1) == numbers).sum(), known.sum()
    return {"loss": (_losses(outputs, numbers).sum(), count), "accuracy": (right, count)}


def classified(labels: Tensor, classes: Sequence[int]) -> int:
    """Returns the number of targets that are classes, as `classification` counts them."""
    return int(torch.isin(labels, torch.tensor(classes, device=labels.device)).sum())


def reward_model(outputs: Tensor, labels: Tensor) -> Sums:
    """Returns the loss of a Bradley–Terry model of preferences: −log σ(reward of chosen − reward of rejected).

    outputs: [rows, length, 1], of `model.num_labels=1`. The reward of a conversation is the output at its last target,
    the last token before the one that ends it (arXiv 2203.02155, equation 1). labels: as for `z_loss`; rows 2 · p and
    2 · p + 1 are the chosen and the rejected conversation of pair p. Unit: pair.
    """
    rewards = _at_last_target(outputs, labels)
    margins = rewards[0::2] - rewards[1::2]
    count = torch.tensor(len(margins))
    return {
        "loss": (-logsigmoid(margins).sum(), count),
        "reward_margin": (margins.sum(), count),
        "reward_accuracy": ((margins > 0).sum(), count),
    }


def regression(outputs: Tensor, labels: Tensor, score: Tensor) -> Sums:
    """Returns the squared error of a document's score, which is predicted by the output at its last target.

    score: [rows], a column of the data: `Custom("llmtrain.objectives:regression", unit="document", columns=["score"])`.
    Other arguments as for `reward_model`. Unit: document.
    """
    errors = _at_last_target(outputs, labels) - score
    count = torch.tensor(len(errors))
    return {"loss": (errors.square().sum(), count), "absolute_error": (errors.abs().sum(), count)}


def _at_last_target(outputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the only output at the last target of each row, [rows]."""
    _check_width(outputs, 1)
    places = torch.arange(labels.shape[1], device=labels.device)
    last = torch.where(labels >= 0, places, -1).amax(1)
    return outputs[torch.arange(len(labels), device=labels.device), last, 0]


def _check_width(outputs: Tensor, expected: int) -> None:
    if outputs.shape[-1] != expected:
        raise ValueError(f"the model has {outputs.shape[-1]} outputs for a token, not {expected}: set model.num_labels")


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of each token, [rows, length]; 0 without a target."""
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_TARGET, reduction="none")
    return losses.view_as(labels)
