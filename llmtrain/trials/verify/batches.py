"""The recipe's own sequences, made uneven, so that errors which cancel out on uniform sequences show.

A loss averaged by micro-batch, or by rank, instead of by token is right if all of them have equally many targets, as
well-packed sequences almost have. Therefore sample j of a batch of B loses the first j·T/(2·B) of its targets. Whether
documents attend to each other only matters if several share a sequence, which long ones rarely do. Therefore, if the
recipe masks documents, another one begins at position (j+1)·T/(B+1) of sample j.

If the loss is a mean over pairs, or labelled completions, every third sample loses its first one instead; their
documents share sequences anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmtrain.data import NO_TARGET, BatchLoader, Completions, MicroBatch, Prepared, PreparedSource, StepBatch
from llmtrain.data.samples import PackedSamples
from llmtrain.data.sources.corpus import Split
from llmtrain.engines import Engine
from llmtrain.engines.reference_model import Values, attach, log_probs
from llmtrain.plan import Plan
from llmtrain.recipe import Recipe
from llmtrain.trials.verify import reference
from llmtrain.trials.verify.documents import read_documents
from llmtrain.trials.verify.reference import ReferenceDocument, Sequences, count_items

LOSES_ONE = 3
EVAL_SEQUENCES = 16
"""Largest number of held-out sequences in the comparison."""


class Batches:
    """The batches of a recipe: as documents, for the reference, or as a plan gives them to a rank."""

    def __init__(self, recipe: Recipe, prepared: Prepared, steps: int) -> None:
        self.recipe = recipe
        self.prepared = prepared
        self.steps = steps
        self.size = recipe.batch.global_batch_size

    def whole(self, order: int | None = None) -> Iterator[Sequences]:
        """Yields the global batch of each step; each `order` has another order of its samples."""
        for step, sequences in enumerate(self._uneven_steps):
            generator = torch.Generator().manual_seed(self.steps * (order or 0) + step)
            permutation = torch.arange(self.size) if order is None else torch.randperm(self.size, generator=generator)
            yield [sequences[index] for index in permutation.tolist()]

    def held_out(self) -> Sequences:
        """Returns the held-out sequences."""
        views = [source.eval for source in self.prepared.evaluated()]
        order = self.prepared.eval_order()
        numbered = zip(order.sources[: self._held_out].tolist(), order.index[: self._held_out].tolist(), strict=True)
        data, padding = self.recipe.data, self.prepared.eos_id
        return [read_documents(views[source], number, data, padding) for source, number in numbered]

    def part(self, plan: Plan, dp_rank: int) -> Iterator[StepBatch]:
        """Yields what a plan's own schedule gives to a data parallel rank in each step."""
        loader = BatchLoader.of(plan, self.prepared, dp_rank)
        micro, dp = plan.read_size, plan.readers

        def uneven(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
            firsts = [(index * dp + dp_rank) * micro for index in range(len(micro_batches))]
            rows = [torch.arange(first, first + micro) for first in firsts]
            return [
                self._uneven(micro_batch, samples) for micro_batch, samples in zip(micro_batches, rows, strict=True)
            ]

        for step, hidden in enumerate(self._hidden):
            batch = loader.train_batch(step * self.size)
            yield replace(
                batch,
                micro_batches=uneven(batch.micro_batches),
                mismatched=uneven(batch.mismatched),
                target_tokens=batch.target_tokens - (hidden if batch.examples is None else 0),
                examples=None if batch.examples is None else batch.examples - hidden,
            )

    def referenced(self, engine: Engine, plan: Plan) -> Batches:
        """Returns batches with references (`Completions`) that the engine computes. All ranks call it."""
        if not plan.recipe.objective.needs_reference:
            return self
        needed: dict[tuple[str, Split], list[NDArray[np.int64]]] = defaultdict(list)
        loader, order = BatchLoader.of(plan, self.prepared, 0), self.prepared.eval_order()
        drawn = loader.sample_ids(0, self.steps * self.size)
        for number, source in enumerate(self.prepared.sources):
            needed[source.key, "train"].append(drawn[1][drawn[0] == number])
        for number, index in order.by_source(self._held_out):
            needed[self.prepared.evaluated()[number].key, "eval"].append(index)

        def found(source: PreparedSource, split: Split, view: PackedSamples) -> Values:
            sequences = np.unique(np.concatenate([np.empty(0, np.int64), *needed[source.key, split]]))
            return log_probs(engine, plan, self.prepared, view, sequences)

        return Batches(self.recipe, attach(self.prepared, found), self.steps)

    def eval_batches(self, plan: Plan, dp_rank: int) -> Iterator[StepBatch]:
        """Yields held-out sequences as a plan gives them to a data parallel rank."""
        return BatchLoader.of(plan, self.prepared, dp_rank).eval_batches(self._held_out)

    @property
    def _held_out(self) -> int:
        return min(EVAL_SEQUENCES, self.recipe.evaluation.max_sequences or EVAL_SEQUENCES)

    @cached_property
    def _read_steps(self) -> list[Sequences]:
        """Global batches, read by document."""
        data, padding = self.recipe.data, self.prepared.eos_id
        sizes = {"global_batch_size": self.size, "micro_batch_size": self.size, "gradient_accumulation_steps": 1}
        loader = BatchLoader(self.prepared, seed=self.recipe.train.seed, dp_rank=0, dp_size=1, **sizes)  # type: ignore[arg-type]
        views = [source.train for source in self.prepared.sources]
        steps: list[Sequences] = []
        for step in range(self.steps):
            ids = zip(*(column.tolist() for column in loader.sample_ids(step * self.size, self.size)), strict=True)
            steps.append([read_documents(views[source], number, data, padding) for source, number in ids])
        return steps

    @cached_property
    def _uneven_steps(self) -> list[Sequences]:
        return [
            [self._uneven_documents(documents, sample) for sample, documents in enumerate(sequences)]
            for sequences in self._read_steps
        ]

    @cached_property
    def _hidden(self) -> list[int]:
        """Number of items that each global batch has lost."""
        steps = zip(self._read_steps, self._uneven_steps, strict=True)
        return [count_items(read, self.recipe) - count_items(uneven, self.recipe) for read, uneven in steps]

    @property
    def _conversations(self) -> int:
        """Number of conversations in an example: a pair has two."""
        return 2 if self.recipe.objective.compares_pairs else 1

    def _places(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the number of targets that samples lose, and the position where they are cut.

        samples: indices within their batch.
        """
        length = self.recipe.data.sequence_length
        return samples * length // (2 * self.size), (samples + 1) * length // (self.size + 1)

    def _uneven(self, rows: MicroBatch, samples: Tensor) -> MicroBatch:
        """Makes rows uneven; `samples` are their indices within their batch."""
        if (found := rows.completions) is not None:
            lost = (samples[:, None] % LOSES_ONE == 1) & (found.segment_ids < self._conversations)
            labels = rows.labels.masked_fill(lost, NO_TARGET)
            left = Completions.of(found.segment_ids, labels, found.references, found.desirable)
            return replace(rows, labels=labels, completions=left)
        hidden, start = (place[:, None] for place in self._places(samples))
        columns = torch.arange(rows.labels.shape[1])[None]
        positions = rows.position_ids
        if self.recipe.data.has_document_mask:
            # Only the document that contains the position is cut there.
            across = (columns >= start) & (columns - positions < start)
            positions = torch.where(across, columns - start, positions)
        return replace(rows, labels=rows.labels.masked_fill(columns < hidden, NO_TARGET), position_ids=positions)

    def _uneven_documents(self, documents: Sequence[ReferenceDocument], sample: int) -> list[ReferenceDocument]:
        """Does the same as `_uneven` for the documents of one sequence."""
        if self.recipe.objective.reads_completions:
            lost = self._conversations if sample % LOSES_ONE == 1 else 0
            empty = [
                ReferenceDocument(document.inputs, torch.full_like(document.targets, reference.NO_TARGET))
                for document in documents[:lost]
            ]
            return [*empty, *documents[lost:]]
        hidden, start = (int(place) for place in self._places(torch.tensor(sample)))
        uneven: list[ReferenceDocument] = []
        begin = 0
        for document in documents:
            end = begin + len(document.inputs)
            columns = torch.arange(begin, end)
            targets = document.targets.masked_fill(columns < hidden, reference.NO_TARGET)
            is_cut = self.recipe.data.has_document_mask and begin < start < end
            sizes = [start - begin, end - start] if is_cut else [end - begin]
            parts = zip(torch.split(document.inputs, sizes), torch.split(targets, sizes), strict=True)
            values = [None] * len(sizes) if document.values is None else torch.split(document.values, sizes)
            uneven += [ReferenceDocument(*part, values=own) for part, own in zip(parts, values, strict=True)]
            begin = end
        return uneven
