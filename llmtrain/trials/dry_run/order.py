"""Determines the samples that the ranks of a plan read first, with the sampler itself, without starting a rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmtrain.data import BatchLoader, Prepared
from llmtrain.data.loader import rows_of
from llmtrain.data.order import Mixture
from llmtrain.plan.plan import Plan
from llmtrain.recipe import Part

STEPS, REPLICAS, MICRO_BATCHES, ROWS = 2, 8, 4, 16
"""Largest numbers of steps, replicas, micro-batches and rows that are reported."""


class Read(Part):
    """A micro-batch of a replica."""

    step: int
    """Optimizer step, from 1."""
    data_rank: int
    """Index of the replica, or of the process that reads for several."""
    micro_batch: int
    """Index within the step, from 0."""
    first: int
    """Index of its first sample, counted from the beginning of the run."""
    rows: int
    """Number of its samples, which are consecutive."""
    sources: tuple[int, ...]
    """Index of the source of each sample in the recipe, for the first `ROWS` samples."""
    sequences: tuple[int, ...] = ()
    """Index of each sequence within its source; empty if the data are not prepared on this machine."""


class DataOrder(Part):
    """The first batches of a plan."""

    sources: tuple[str, ...]
    """Names of the sources."""
    is_prepared: bool
    """Whether the data are prepared here, so that sequences are known and not only samples."""
    ranks: tuple[tuple[int, ...], ...]
    """For the first replicas, the ranks that read for each."""
    reads: tuple[Read, ...]


def first_batches(plan: Plan, prepared: Prepared | None) -> DataOrder:
    """Returns the first micro-batches of the first replicas in the first steps.

    prepared: None if the data are not on this machine.
    """
    return DataOrder(
        sources=tuple(source.name for source in plan.recipe.data.sources),
        is_prepared=prepared is not None,
        ranks=tuple(_ranks_of(plan, replica) for replica in range(min(plan.readers, REPLICAS))),
        reads=tuple(_reads(plan, prepared)),
    )


def _ranks_of(plan: Plan, replica: int) -> tuple[int, ...]:
    """Returns the ranks of a replica.

    Tensor parallel ranks are innermost, then sequence, data and pipeline (`links.Groups`).
    """
    inner = plan.workers // plan.parallel.pipeline // plan.readers  # the ranks that share a sample and a stage
    starts = ((stage * plan.readers + replica) * inner for stage in range(plan.parallel.pipeline))
    return tuple(start + number for start in starts for number in range(inner))


def _reads(plan: Plan, prepared: Prepared | None) -> Iterator[Read]:
    mixture = Mixture([source.weight for source in plan.recipe.data.sources])
    loader = BatchLoader.of(plan, prepared, dp_rank=0) if prepared else None
    batch = plan.batch
    for step in range(STEPS):
        for replica in range(min(plan.readers, REPLICAS)):
            for micro in range(min(batch.gradient_accumulation_steps, MICRO_BATCHES)):
                rows = rows_of(micro, replica, plan.readers, plan.read_size)
                first, shown = step * batch.global_batch_size + rows.start, min(plan.read_size, ROWS)
                if loader:
                    sources, sequences = loader.sample_ids(first, shown)
                else:
                    sources, sequences = mixture.locate(np.arange(first, first + shown))[0], np.empty(0, np.int64)
                yield Read(
                    step=step + 1,
                    data_rank=replica,
                    micro_batch=micro,
                    first=first,
                    rows=plan.read_size,
                    sources=tuple(sources.tolist()),
                    sequences=tuple(sequences.tolist()),
                )
