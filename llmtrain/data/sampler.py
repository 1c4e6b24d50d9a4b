"""Which sequences each step trains on, and this rank's part of them as tensors.

The order is a function of the seed and the number of samples consumed, and of nothing else:
neither the number of ranks nor the size of a batch changes it, and any place in it is reached in
constant time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.documents import Documents
from llmtrain.data.mixture import Mixture
from llmtrain.data.permutation import permutation_key, permute
from llmtrain.data.prefetch import prefetched
from llmtrain.data.prepare import Prepared, PreparedSource
from llmtrain.data.samples import Rows, Samples, empty_rows
from llmtrain.errors import DataError, Problem
from llmtrain.plan.plan import Plan

if TYPE_CHECKING:
    import torch

Index = NDArray[np.int64]
READ_TOKENS = 1 << 14
"""Of a rank, of the steps that are read together; of one step where that has more."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads; each [micro_batch_size, T], int64."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    """They start again at 0 at each document where documents are masked."""
    labels: torch.Tensor
    """The target of the input at the same place: already shifted. -100 where there is none."""

    @cached_property
    def documents(self) -> Documents | None:
        """Where they begin and end in `position_ids`; None where these lie on a device, which is not asked."""
        return Documents.of(self.position_ids) if self.position_ids.device.type == "cpu" else None


@dataclass(frozen=True)
class StepBatch:
    """What one optimizer step, or one step of evaluation, reads on this rank."""

    micro_batches: list[MicroBatch]
    """This rank's part."""
    target_tokens: int
    """Labels other than -100 in the whole global batch."""
    samples: int
    """Sequences of the global batch, padding rows not counted."""
    first_sample: int
    """Number of its first sequence."""
    evaluated: str = ""
    """Of an evaluation the source, by its name: a batch of an evaluation is of one source."""


def rows_of(micro_step: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> slice:
    """The samples of a global batch that a rank reads in a micro step.

    Sample j goes to micro step m and row k of the rank where j = (m · dp_size + dp_rank) · micro_batch_size + k.
    """
    start = (micro_step * dp_size + dp_rank) * micro_batch_size
    return slice(start, start + micro_batch_size)


class Schedule:
    """The batches of one rank, dealt as `rows_of` says."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        """Raises DataError where a source has fewer sequences than one global batch takes from it."""
        if global_batch_size != micro_batch_size * gradient_accumulation_steps * dp_size:
            raise ValueError(
                f"{global_batch_size} != {micro_batch_size} * {gradient_accumulation_steps} * {dp_size} sequences"
            )
        self._prepared = prepared
        self._seed = seed
        self._global = global_batch_size
        self._micro = micro_batch_size
        self._steps = gradient_accumulation_steps
        self._rank = dp_rank
        self._size = dp_size
        self._mixture = Mixture([source.weight for source in prepared.sources])
        self._train = [source.train for source in prepared.sources]
        self._eval = [source.eval for source in prepared.evaluated]
        self._check_sizes()

    @classmethod
    def of(cls, plan: Plan, prepared: Prepared, dp_rank: int) -> Self:
        """The batches that a plan gives to a data parallel rank."""
        return cls(
            prepared,
            seed=plan.recipe.train.seed,
            global_batch_size=plan.batch.global_batch_size,
            micro_batch_size=plan.read_size,
            gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
            dp_rank=dp_rank,
            dp_size=plan.readers,
        )

    def sample_ids(self, cursor: int, samples: int) -> tuple[Index, Index]:
        """The source, and the sequence within it, of training samples `cursor` to `cursor + samples`."""
        sources, numbers = self._mixture.locate(np.arange(cursor, cursor + samples))
        sequences = np.empty_like(numbers)
        for number, source in enumerate(self._prepared.sources):
            mine = sources == number
            sequences[mine] = _shuffled(numbers[mine], source, self._seed)
        return sources, sequences

    def train_batch(self, cursor: int) -> StepBatch:
        """The batch of samples `cursor` to `cursor + global_batch_size`, `cursor` counting samples from 0."""
        return self._train_steps(cursor, 1)[0]

    def train_batches(self, cursor: int) -> Iterator[StepBatch]:
        """Batch after batch from sample `cursor` on, without end, made ahead in a thread; close it to stop."""
        with closing(prefetched(self._reads(cursor))) as reads:
            for steps in reads:
                yield from steps

    def eval_batches(self, max_sequences: int | None = None) -> Iterator[StepBatch]:
        """The first `max_sequences` sequences to evaluate on (default all), one micro batch per rank and step.

        The order is the same in every run, source by source. Rows without a target fill the last batch of each source.
        """
        return prefetched(self._eval_batches(max_sequences))

    def _eval_batches(self, max_sequences: int | None) -> Iterator[StepBatch]:
        step = self._micro * self._size
        first = 0
        for number, sequences in self._prepared.eval_order().by_source(max_sequences):
            for start in range(0, len(sequences), step):
                batch = self._eval_batch(number, sequences[start : start + step], first)
                first += batch.samples
                yield batch

    def _eval_batch(self, number: int, sequences: Index, first: int) -> StepBatch:
        sources = np.full_like(sequences, number)
        _announce(self._eval, sources, sequences)
        micro_batches = self._micro_batches(self._eval, sources, sequences, steps=1)
        targets = int(_targets(self._eval, sources, sequences).sum())
        return StepBatch(micro_batches, targets, len(sequences), first, self._prepared.evaluated[number].name)

    def _reads(self, cursor: int) -> Iterator[list[StepBatch]]:
        """Batch after batch, those of several steps read together; the first, which is waited for, alone.

        The thread that reads is not woken in every step: it would take the interpreter's lock from the training.
        """
        own_tokens = self._steps * self._micro * self._prepared.sequence_length
        steps, most = 1, max(1, READ_TOKENS // own_tokens)
        while True:
            yield self._train_steps(cursor, steps)
            cursor += steps * self._global
            steps = min(2 * steps, most)

    def _train_steps(self, cursor: int, steps: int) -> list[StepBatch]:
        """The batches of `steps` steps from sample `cursor` on.

        All at once: what a call of numpy costs, and the interpreter's lock that it holds meanwhile, is paid once.
        """
        sources, sequences = self.sample_ids(cursor, steps * self._global)
        _announce(self._train, sources, sequences)  # the disk reads it while this rank's rows are put together
        micro_batches = self._micro_batches(self._train, sources, sequences, steps * self._steps)
        targets = _targets(self._train, sources, sequences).reshape(steps, self._global).sum(axis=1).tolist()
        return [
            StepBatch(
                micro_batches[step * self._steps : (step + 1) * self._steps],
                targets[step],
                self._global,
                cursor + step * self._global,
            )
            for step in range(steps)
        ]

    def _micro_batches(self, views: list[Samples], sources: Index, sequences: Index, steps: int) -> list[MicroBatch]:
        """Reads this rank's sequences of `steps` micro steps; rows that are lacking are padding."""
        numbers = np.arange(len(sources))
        rows = np.concatenate([numbers[rows_of(step, self._rank, self._size, self._micro)] for step in range(steps)])
        sources, sequences = sources[rows], sequences[rows]
        batch = empty_rows(steps * self._micro, self._prepared.sequence_length, self._prepared.eos_id)
        for number, view in enumerate(views):
            mine = np.flatnonzero(sources == number)
            if mine.size:
                for target, values in zip(batch, view.read(sequences[mine]), strict=True):
                    target[mine] = values
        return _tensors(batch, steps)

    def _check_sizes(self) -> None:
        problems = []
        for number, source in enumerate(self._prepared.sources):
            needed = self._mixture.share(number, self._global)
            if len(source.train) < needed:
                message = (
                    f"'{source.name}' has {len(source.train):,} training sequences of "
                    f"{self._prepared.sequence_length} tokens, and one global batch takes {needed:,} of them"
                )
                fix = "give more text, or lower batch.global_batch_size or data.sequence_length"
                problems.append(Problem("data.short", f"data.sources.{number}", message, fix))
        if problems:
            raise DataError(problems)


def _shuffled(numbers: Index, source: PreparedSource, seed: int) -> Index:
    """The sequence that is the n-th one drawn from a source, each epoch in its own order."""
    size = len(source.train)
    epochs, places = np.divmod(numbers, size)
    # They rise. Not `np.unique`: its first call imports `numpy.ma`, which takes longer than the whole first batch.
    for epoch in range(epochs[0], epochs[-1] + 1) if epochs.size else ():
        mine = epochs == epoch
        places[mine] = permute(places[mine], size, permutation_key(seed, source.key, epoch))
    return places


def _announce(views: list[Samples], sources: Index, sequences: Index) -> None:
    for number, view in enumerate(views):
        view.announce(sequences[sources == number])


def _targets(views: list[Samples], sources: Index, sequences: Index) -> Index:
    """Labels other than -100 of each sequence."""
    found = np.zeros(len(sequences), np.int64)
    for number, view in enumerate(views):
        mine = sources == number
        found[mine] = view.targets(sequences[mine])
    return found


def _tensors(rows: Rows, steps: int) -> list[MicroBatch]:
    """The rows of `steps` micro steps, as many in each."""
    # Here and not above: preparing data, in a launcher, must not load torch.
    import torch

    parts = zip(*(torch.from_numpy(values).chunk(steps) for values in rows), strict=True)
    found = [MicroBatch(*part) for part in parts]
    for batch in found:
        _ = batch.documents  # found now, in the thread that reads: between kernels it would take ten times as long
    return found
