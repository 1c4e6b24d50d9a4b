"""The recipe's own sequences, made uneven: what is right only where all sequences are alike must show.

A loss averaged by micro-batch, or by rank, and not by token is right wherever all of them have equally many
targets, and well packed sequences nearly do: sample j of a batch of B loses the first j·T/(2·B) of its targets.
Whether documents see each other matters only where several share a sequence, which long ones hardly do: where
the recipe masks documents, another one begins at place (j+1)·T/(B+1) of sample j.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from llmtrain.data import MicroBatch, Prepared, Schedule, StepBatch
from llmtrain.models import IGNORE
from llmtrain.plan import Plan
from llmtrain.recipe import Recipe

EVAL_SEQUENCES = 16
"""Held-out sequences of the comparison, at most."""


class Batches:
    """The batches of a recipe: whole, in any order, or as a plan gives them to a rank."""

    def __init__(self, recipe: Recipe, prepared: Prepared, steps: int) -> None:
        self.recipe = recipe
        self.prepared = prepared
        self.steps = steps
        self.size = recipe.batch.global_batch_size

    def whole(self, micro_batch_size: int, order: int | None = None) -> Iterator[StepBatch]:
        """The whole batch of each step, cut into micro-batches; in another order of its samples for each `order`."""
        for step, (rows, targets) in enumerate(zip(self._rows, self._targets, strict=True)):
            generator = torch.Generator().manual_seed(self.steps * (order or 0) + step)
            places = torch.arange(self.size) if order is None else torch.randperm(self.size, generator=generator)
            parts = torch.split(places, micro_batch_size)
            yield StepBatch([_pick(rows, part) for part in parts], targets, self.size, step * self.size)

    def part(self, plan: Plan, dp_rank: int) -> Iterator[StepBatch]:
        """What a plan's own schedule gives to a data parallel rank in each step."""
        schedule = Schedule.of(plan, self.prepared, dp_rank)
        micro, dp = plan.read_size, plan.readers
        for step, targets in enumerate(self._targets):
            batch = schedule.train_batch(step * self.size)
            uneven = []
            for index, micro_batch in enumerate(batch.micro_batches):
                first = (index * dp + dp_rank) * micro
                uneven.append(self._uneven(micro_batch, torch.arange(first, first + micro)))
            yield replace(batch, micro_batches=uneven, target_tokens=targets)

    def held_out(self, plan: Plan | None = None, dp_rank: int = 0) -> Iterator[StepBatch]:
        """Held-out sequences, whole or as a plan splits them."""
        schedule = Schedule.of(plan, self.prepared, dp_rank) if plan else self._schedule
        most = min(EVAL_SEQUENCES, self.recipe.evaluation.max_sequences or EVAL_SEQUENCES)
        return schedule.eval_batches(most)

    @cached_property
    def _schedule(self) -> Schedule:
        sizes = {"global_batch_size": self.size, "micro_batch_size": self.size, "gradient_accumulation_steps": 1}
        return Schedule(self.prepared, seed=self.recipe.train.seed, dp_rank=0, dp_size=1, **sizes)

    @cached_property
    def _rows(self) -> list[MicroBatch]:
        """The global batch of each step as one micro-batch."""
        batches = (self._schedule.train_batch(step * self.size) for step in range(self.steps))
        return [self._uneven(batch.micro_batches[0], torch.arange(self.size)) for batch in batches]

    @cached_property
    def _targets(self) -> list[int]:
        return [int((rows.labels != IGNORE).sum()) for rows in self._rows]

    def _uneven(self, rows: MicroBatch, samples: Tensor) -> MicroBatch:
        """Rows with the numbers `samples` within their batch."""
        length = rows.labels.shape[1]
        places = torch.arange(length)[None]
        hidden = places < (samples * length // (2 * self.size))[:, None]
        positions = rows.position_ids
        if self.recipe.data.mask_documents:
            start = ((samples + 1) * length // (self.size + 1))[:, None]
            # Only the document that lies across the place is cut there.
            across = (places >= start) & (places - positions < start)
            positions = torch.where(across, places - start, positions)
        return replace(rows, labels=rows.labels.masked_fill(hidden, IGNORE), position_ids=positions)


def _pick(rows: MicroBatch, places: Tensor) -> MicroBatch:
    return MicroBatch(rows.input_ids[places], rows.position_ids[places], rows.labels[places])
