"""Typical bugs of a loss of one's own, planted into the real engine. Each is `bug(patch)`, as in `planted`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import distributed as dist

from llmtrain.data import StepBatch, loader
from llmtrain.data.store import Stream
from llmtrain.engines.deepspeed.ulysses import Ulysses
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


def numbers_of_the_document_before(patch):
    original = Stream.values_at
    patch.setattr(Stream, "values_at", lambda stream, tokens: original(stream, (tokens - 40).clip(0)))


def numbers_of_other_rows(patch):
    """Each row of a rank's micro-batches has the numbers of the next one."""
    original = loader._tensors

    def rolled(rows, *options):
        return original(rows._replace(values=np.roll(rows.values, 1, axis=0)), *options)

    patch.setattr(loader, "_tensors", rolled)


def numbers_of_ones(patch):
    original = Stream.values_at
    patch.setattr(Stream, "values_at", lambda stream, tokens: np.ones_like(original(stream, tokens)))


def numbers_of_the_first_slice(patch):
    """Every rank takes the numbers of the first part of the sequence."""
    original = Ulysses.slice

    def first(ulysses, batch):
        part = original(ulysses, batch)
        return replace(part, values=batch.values if batch.values is None else batch.values[:, : part.labels.shape[1]])

    patch.setattr(Ulysses, "slice", first)
