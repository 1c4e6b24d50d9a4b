"""Typical bugs of a loss of one's own, planted into the real engine. Each is `bug(patch)`, as in `planted`."""

from __future__ import annotations

import torch
from torch import distributed as dist

from llmtrain.data import StepBatch
from llmtrain.models import own_loss
from llmtrain.models.own_loss import OwnLoss


def counts_of_a_rank(patch):
    """Each rank divides by the number of its own items."""
    original = StepBatch.divisor.fget
    patch.setattr(StepBatch, "divisor", property(lambda batch: original(batch) + dist.get_rank()))


def targets_instead_of_items(patch):
    patch.setattr(StepBatch, "num_items", property(lambda batch: batch.target_tokens))


def rows_instead_of_documents(patch):
    """The loss is given sequences, each with all its documents."""

    def rows(values, bounds, kept, padding):
        return values

    patch.setattr(own_loss, "document_rows", rows)


def pairs_swapped(patch):
    original = own_loss.document_rows

    def swapped(*arguments):
        rows = original(*arguments)
        return rows[torch.arange(len(rows)) ^ 1] if dist.get_rank() else rows

    patch.setattr(own_loss, "document_rows", swapped)


def mean_of_micro_batches(patch):
    """Each micro-batch has the same weight, however many items it has."""
    original = OwnLoss.__call__

    def mean(self, logits, batch):
        total = original(self, logits, batch)
        return total * 2 / self._seen[-1][0] if self._seen else total

    patch.setattr(OwnLoss, "__call__", mean)
