"""Losses that are functions of logits, labels and columns, as a user's own are: recipes name them by their path.

Each returns the sum of the losses of all units in its rows and their number, and such a pair for each further metric.
The mean over the global batch is taken by the engines (`docs/extending.md`, "A loss").
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


def classification(logits: Tensor, labels: Tensor, classes: Sequence[int]) -> Sums:
    """Returns the cross-entropy among the tokens of some classes, at the positions that have one of them as target.

    classes: a token for each class. A document is classified by its last token, for example by the completion of a
    prompt; other targets are not trained on. Other arguments as for `z_loss`. Unit: token, with `classified` as count.
    """
    tokens = torch.tensor(classes, device=labels.device)
    matches = labels[..., None] == tokens
    known = matches.any(-1)
    numbers = matches.int().argmax(-1).where(known, NO_TARGET)
    scores, count = logits[..., tokens], known.sum()
    right = (scores.argmax(-1) == numbers).sum()
    return {"loss": (_losses(scores, numbers).sum(), count), "accuracy": (right, count)}


def classified(labels: Tensor, classes: Sequence[int]) -> int:
    """Returns the number of targets that are classes, as `classification` counts them."""
    return int(torch.isin(labels, torch.tensor(classes, device=labels.device)).sum())


def reward_model(logits: Tensor, labels: Tensor, token: int) -> Sums:
    """Returns the loss of a Bradley–Terry model of preferences: −log σ(reward of chosen − reward of rejected).

    token: the reward of a conversation is the logit of this token at its last target (arXiv 2203.02155, equation 1,
    where a head of its own gives it). logits, labels: as for `z_loss`; rows 2 · p and 2 · p + 1 are the chosen and the
    rejected conversation of pair p. Unit: pair.
    """
    rewards = _at_last_target(logits, labels, token)
    margins = rewards[0::2] - rewards[1::2]
    count = torch.tensor(len(margins))
    return {
        "loss": (-logsigmoid(margins).sum(), count),
        "reward_margin": (margins.sum(), count),
        "reward_accuracy": ((margins > 0).sum(), count),
    }


def regression(logits: Tensor, labels: Tensor, score: Tensor, token: int) -> Sums:
    """Returns the squared error of a document's score, which is predicted by the logit of a token at its last target.

    score: [rows], a column of the data: `Custom("llmtrain.objectives:regression", unit="document", columns=["score"],
    token=...)`. Other arguments as for `reward_model`. Unit: document.
    """
    errors = _at_last_target(logits, labels, token) - score
    count = torch.tensor(len(errors))
    return {"loss": (errors.square().sum(), count), "absolute_error": (errors.abs().sum(), count)}


def _at_last_target(logits: Tensor, labels: Tensor, token: int) -> Tensor:
    """Returns the logit of a token at the last target of each row, [rows]."""
    places = torch.arange(labels.shape[1], device=labels.device)
    last = torch.where(labels >= 0, places, -1).amax(1)
    return logits[torch.arange(len(labels), device=labels.device), last, token]


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of each token, [rows, length]; 0 without a target."""
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_TARGET, reduction="none")
    return losses.view_as(labels)
