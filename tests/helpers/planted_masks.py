"""Bugs in the loss masks of conversations, planted into the real engine; each as in `planted`."""

from __future__ import annotations

from dataclasses import replace

import torch

from llmtrain.data import NO_TARGET
from tests.helpers.planted import _on_batch, _on_micro_batch, loss_by_micro_batch


def _with_mask(change):
    """Trains on the tokens that `change(is_trained)` selects."""

    def masked(rows):
        following = torch.cat([rows.input_ids[:, 1:], rows.labels[:, -1:]], dim=1)
        is_trained = rows.labels != NO_TARGET
        return replace(rows, labels=torch.where(change(is_trained), following, NO_TARGET))

    return lambda patch: _on_micro_batch(patch, masked)


def mask_shifted_to_the_left(patch):
    _with_mask(lambda mask: torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1))(patch)


def mask_shifted_to_the_right(patch):
    _with_mask(lambda mask: torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1))(patch)


def ends_of_turns_left_out(patch):
    _with_mask(lambda mask: mask & torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1))(patch)


def beginnings_of_turns_left_out(patch):
    _with_mask(lambda mask: mask & torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1))(patch)


def questions_trained_on(patch):
    _with_mask(torch.ones_like)(patch)


def mean_over_all_inputs(patch):
    """The loss is divided by the number of all input tokens."""

    def count(plan, batch):
        return replace(batch, target_tokens=batch.samples * plan.recipe.data.sequence_length)

    _on_batch(patch, count)


def mean_by_micro_batch(patch):
    loss_by_micro_batch(patch)


MASKED = (
    mask_shifted_to_the_left,
    mask_shifted_to_the_right,
    ends_of_turns_left_out,
    beginnings_of_turns_left_out,
    questions_trained_on,
    mean_over_all_inputs,
    mean_by_micro_batch,
)
