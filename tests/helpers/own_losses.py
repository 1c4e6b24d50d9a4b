"""Losses of a user's own: two right ones, and wrong ones, each of which would depend on how a run is divided."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def token_sum(logits, labels):
    return losses_of(logits, labels).sum(), (labels >= 0).sum()


def document_mean(logits, labels):
    """Each document counts alike, however long it is."""
    lengths = (labels >= 0).sum(1)
    return {
        "loss": ((losses_of(logits, labels).sum(1) / lengths).sum(), len(labels)),
        "length": (lengths.sum(), len(labels)),
    }


def pair_margin(logits, labels):
    losses = losses_of(logits, labels).sum(1)
    return (losses[0::2] - losses[1::2]).sum(), len(labels) // 2


def hidden_tokens(hidden, weight, labels):
    """Computes the logits of positions with targets only."""
    seen = labels >= 0
    logits = hidden[seen].float() @ weight.float().T
    right = (logits.argmax(-1) == labels[seen]).sum()
    return {"loss": (cross_entropy(logits, labels[seen], reduction="sum"), seen.sum()), "right": (right, seen.sum())}


def hidden_documents(hidden, weight, labels):
    """Depends on the last target of each document."""
    rows = torch.arange(len(labels), device=labels.device)
    last = torch.where(labels >= 0, torch.arange(labels.shape[1], device=labels.device), -1).amax(1)
    logits = hidden[rows, last].float() @ weight.float().T
    return cross_entropy(logits, labels[rows, last], reduction="sum"), len(labels)


def mixes_weight_gradients(hidden, weight, labels):
    """The right sum and gradients of hidden states; the head's depends on the number of rows."""
    loss, count = hidden_documents(hidden, weight, labels)
    return loss + (len(labels) - 1) * (weight - weight.detach()).sum(), count


def even_tokens(logits, labels):
    """Counts only tokens with an even number."""
    even = (labels >= 0) & (labels % 2 == 0)
    return losses_of(logits, labels).where(even, 0).sum(), even.sum()


def count_even(labels):
    return int(((labels >= 0) & (labels % 2 == 0)).sum())


def count_nothing(labels):
    return 0


def count_rows(labels):
    return len(labels)


def weighted(logits, labels, a, b=1.0):
    """Each token counts as much as its document's number says."""
    return (losses_of(logits, labels) * a * b).sum(), (labels >= 0).sum()


def weighted_documents(logits, labels, a):
    lengths = (labels >= 0).sum(1)
    return {
        "loss": ((losses_of(logits, labels).sum(1) / lengths * a).sum(), len(labels)),
        "weight": (a.sum(), len(labels)),
    }


def pair_with_margin(logits, labels, margin):
    losses = losses_of(logits, labels).sum(1)
    return torch.relu(losses[0::2] - losses[1::2] + margin[0::2]).sum(), len(labels) // 2


def heavy(logits, labels, a):
    """Counts only documents, or tokens of them, with a large number."""
    chosen = _is_heavy(labels, a)
    losses = losses_of(logits, labels)
    return (losses if a.ndim == 2 else losses.sum(1)).where(chosen, 0).sum(), chosen.sum()


def count_heavy(labels, a):
    return int(_is_heavy(labels, a).sum())


def _is_heavy(labels, a):
    return (a > 0.9) & (labels >= 0 if a.ndim == 2 else (labels >= 0).any(1))


def class_of_column(logits, labels, kind):
    """The class of a document is a column; the logits of two tokens at its end predict it."""
    last = torch.where(labels >= 0, torch.arange(labels.shape[1]), -1).amax(1)
    scores = logits[torch.arange(len(labels)), last][:, [3, 4]]
    return cross_entropy(scores, kind.long(), reduction="sum"), len(labels)


def normalised_weights(logits, labels, a):
    return (losses_of(logits, labels) * a / a.mean()).sum(), (labels >= 0).sum()


def weights_of_neighbours(logits, labels, a):
    return (losses_of(logits, labels).sum(1) * a.roll(1)).sum(), len(labels)


def mean_of_tokens(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten()), (labels >= 0).sum()


def mean_of_rows(logits, labels):
    return losses_of(logits, labels).mean(1).sum(), (labels >= 0).sum()


def mixes_rows(logits, labels):
    losses = losses_of(logits, labels)
    return (losses * losses.detach().amax()).sum(), (labels >= 0).sum()


def first_row_counts_double(logits, labels):
    losses = losses_of(logits, labels)
    return losses.sum() + losses[0].sum(), (labels >= 0).sum()


def mixes_gradients(logits, labels):
    """Its sum is right, but its gradient depends on the number of rows."""
    total = losses_of(logits, labels).sum()
    scaled = total / len(labels)
    return scaled + (total - scaled).detach(), (labels >= 0).sum()


def counts_padding(logits, labels):
    return losses_of(logits, labels).sum(), labels.numel()


def trains_padding(logits, labels):
    log_z = logits.logsumexp(-1)
    return (losses_of(logits, labels) + 0.1 * log_z.square()).sum(), (labels >= 0).sum()


def needs_neighbours(logits, labels):
    """The loss of a token depends on the one before it, which another rank may hold."""
    losses = losses_of(logits, labels)
    return losses.sum() + (losses[:, 1:] * losses[:, :-1]).sum(), (labels >= 0).sum()


def nan_without_targets(logits, labels):
    targets = (labels >= 0).sum()
    return losses_of(logits, labels).sum() / targets * targets, targets


def infinite(logits, labels):
    return losses_of(logits, labels).sum() / 0, (labels >= 0).sum()


def detached(logits, labels):
    return losses_of(logits, labels).sum().detach(), (labels >= 0).sum()


def not_reduced(logits, labels):
    return losses_of(logits, labels), (labels >= 0).sum()


def only_a_sum(logits, labels):
    return losses_of(logits, labels).sum()


def without_loss(logits, labels):
    return {"cross_entropy": token_sum(logits, labels)}


def mean_as_metric(logits, labels):
    count = (labels >= 0).sum()
    return {"loss": token_sum(logits, labels), "log_z": (logits.logsumexp(-1)[labels >= 0].sum() / count, count)}


def reserved_name(logits, labels):
    return {"loss": token_sum(logits, labels), "grad_norm": token_sum(logits, labels)}


def raises(logits, labels):
    return losses_of(logits, labels)[7].sum(), 1


def option_missing(logits, labels, weight):
    return weight * losses_of(logits, labels).sum(), (labels >= 0).sum()


def in_place(logits, labels):
    logits.div_(2)
    return token_sum(logits, labels)


def all_documents_normalised(logits, labels):
    """As the loss of a batch of documents, if each has a weight that depends on the others."""
    losses = losses_of(logits, labels).sum(1)
    return (losses * torch.softmax(losses, 0) * len(labels)).sum(), len(labels)
