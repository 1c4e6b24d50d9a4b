"""Metrics of evaluations, right and wrong ones, as a user would write them."""

import torch
from torch.nn.functional import cross_entropy


def accuracy(logits, labels):
    return (logits.argmax(-1) == labels).sum(), len(labels)


def probability(logits, labels):
    """The mean probability of the target."""
    return logits.softmax(-1)[torch.arange(len(labels)), labels].sum(), labels.numel()


def entropy_of_even(logits, labels):
    """Counts some of the tokens only."""
    chosen = labels % 2 == 0
    return cross_entropy(logits[chosen], labels[chosen], reduction="sum").item(), chosen.sum()


def mean(logits, labels):
    return (logits.argmax(-1) == labels).float().mean(), 1


def mean_with_count(logits, labels):
    return (logits.argmax(-1) == labels).float().mean(), len(labels)


def needs_neighbours(logits, labels):
    return (labels[1:] == logits.argmax(-1)[:-1]).sum(), len(labels)


def only_a_sum(logits, labels):
    return (logits.argmax(-1) == labels).sum()


def of_tokens(logits, labels):
    return logits.argmax(-1) == labels, len(labels)


def words(logits, labels):
    return "many", len(labels)


def infinite(logits, labels):
    return logits[:, 0].sum() / 0, len(labels)


def in_place(logits, labels):
    return logits.mul_(2)[:, 0].sum(), len(labels)


def random(logits, labels):
    return torch.rand(len(labels)).sum() * 0, len(labels)


def raises(logits, labels):
    return logits[:, :, 0].sum(), len(labels)


def without_labels(logits):
    return logits.sum(), len(logits)
