"""The batches of each step: selects the sequences of the global batch, and reads this rank's micro-batches.

The order depends only on the seed and the number of samples consumed: neither the number of ranks nor the batch size
changes it, and any position in it is reached in constant time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.images import Images
from llmtrain.data.items import Items, document_bounds
from llmtrain.data.order import Mixture, permutation_key, permute
from llmtrain.data.prefetch import prefetched
from llmtrain.data.prepare import MAIN_SET, Prepared, PreparedSource
from llmtrain.data.samples import PackedSamples, Rows, Samples, empty_rows
from llmtrain.data.tokenizer import token_bytes
from llmtrain.errors import DataError, Problem
from llmtrain.plan.plan import SHORTENED_TO, Plan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Documents:
    """The boundaries of the documents in a micro-batch, with its rows concatenated; in host memory."""

    NAMES: ClassVar[tuple[str, ...]] = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    """Names of the arguments that `transformers` passes through its models."""

    bounds: torch.Tensor
    """int32 [documents + 1]: 0, then the end of each document; the last one is the total number of tokens."""
    longest: int
    """Number of tokens of the longest document."""
    has_shared_rows: bool
    """Whether any row contains several documents."""

    @classmethod
    def of(cls, position_ids: torch.Tensor) -> Documents:
        """Finds the documents.

        position_ids: [batch, T], of whole sequences, on the host; they increase by one within a document.
        """
        bounds = document_bounds(position_ids)
        return cls(bounds, int(np.diff(bounds.numpy()).max()), has_shared_rows=len(bounds) - 1 > len(position_ids))

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Returns arguments for a model's forward pass."""
        bounds = self.bounds.to(device, non_blocking=True)
        return dict(zip(self.NAMES, (bounds, bounds, self.longest, self.longest), strict=True))


Index = NDArray[np.int64]


@dataclass(frozen=True)
class Completions:
    """The completions in a micro-batch. In pairs, conversation 2·p of a row is the chosen one of its pair p, and
    conversation 2·p + 1 the rejected one."""

    segment_ids: torch.Tensor
    """[micro_batch_size, T], int64: the index, in its row, of the conversation of each token that has a label."""
    lengths: torch.Tensor
    """[micro_batch_size, conversations], int64: targets of each conversation; 0 if a row has no such conversation."""
    references: torch.Tensor
    """[micro_batch_size, conversations], float64: sum of the log-probabilities of these targets under the reference."""
    desirable: torch.Tensor
    """[micro_batch_size, conversations], bool: whether the completion is desirable; of a pair, the chosen one is."""

    @classmethod
    def of(
        cls, segment_ids: torch.Tensor, labels: torch.Tensor, references: torch.Tensor, desirable: torch.Tensor
    ) -> Self:
        """Counts the targets; whole sequences, on the host."""
        import torch

        lengths = torch.zeros(references.shape, dtype=torch.int64).scatter_add_(1, segment_ids, (labels >= 0).long())
        return cls(segment_ids, lengths, references, desirable)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors, in the order in which they are given."""
        return self.segment_ids, self.lengths, self.references, self.desirable

    def to(self, device: torch.device) -> Completions:
        """Returns a copy on a device."""
        return Completions(*(tensor.to(device, non_blocking=True) for tensor in self.tensors))


@dataclass(frozen=True)
class EmbeddingNoise:
    """The noise of NEFTune for the rows of a micro-batch (`train.neftune_alpha`)."""

    alpha: float
    seeds: tuple[int, ...]
    """Seed of each row: a function of the run's seed and of the number of its sample."""
    length: int
    """`data.sequence_length`."""


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass; each tensor is [micro_batch_size, T], int64."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    """Positions restart at 0 at each document if documents are masked."""
    labels: torch.Tensor
    """The target of the input at the same position, already shifted. `NO_TARGET` if there is none."""
    completions: Completions | None = None
    """Set if the loss is a mean over completions, or over pairs of them."""
    values: torch.Tensor | None = None
    """[micro_batch_size, T, columns], fp32: the numbers in `objective.columns` of the document of each input; None
    without columns."""
    images: Images | None = None
    """Set if the model reads images."""
    noise: EmbeddingNoise | None = None
    """Set if noise is added to the embeddings; only in training."""

    @cached_property
    def documents(self) -> Documents | None:
        """The document boundaries in `position_ids`; None if these are on a device, to avoid a synchronisation."""
        return Documents.of(self.position_ids) if self.position_ids.device.type == "cpu" else None

    def to(self, device: torch.device) -> MicroBatch:
        """Returns a copy on a device."""
        tensors = (self.input_ids, self.position_ids, self.labels)
        input_ids, position_ids, labels = (tensor.to(device, non_blocking=True) for tensor in tensors)
        completions = self.completions and self.completions.to(device)
        values = None if self.values is None else self.values.to(device, non_blocking=True)
        images = self.images and self.images.to(device)
        return MicroBatch(input_ids, position_ids, labels, completions, values, images, self.noise)


@dataclass(frozen=True)
class StepBatch:
    """The input of one optimizer step, or of one step of evaluation, on this rank."""

    micro_batches: list[MicroBatch]
    """This rank's part."""
    target_tokens: int
    """Number of labels other than `NO_TARGET` in the whole global batch."""
    samples: int
    """Number of sequences in the global batch, without padding rows."""
    first_sample: int
    """Index of its first sequence."""
    eval_source: str = ""
    """For an evaluation, the name of the source, of which there is one per batch."""
    examples: int | None = None
    """Number of items in the global batch that the loss is a mean over, such as pairs; None if it is a mean over all
    target tokens."""
    mismatched: list[MicroBatch] = field(default_factory=list)
    """For labelled completions, micro-batches with the same prompts and the completions of others."""

    @property
    def num_items(self) -> int:
        """Number of items that the loss is a mean over: `examples`, or else target tokens."""
        return self.target_tokens if self.examples is None else self.examples

    @property
    def divisor(self) -> int:
        """What the sum of the losses is divided by; a sum over no items is 0."""
        return max(1, self.num_items)


def rows_of(micro_step: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> slice:
    """Returns the samples of a global batch that a rank reads in a micro step.

    Sample j goes to micro step m and row k of the rank such that j = (m · dp_size + dp_rank) · micro_batch_size + k.
    """
    start = (micro_step * dp_size + dp_rank) * micro_batch_size
    return slice(start, start + micro_batch_size)


def with_max_steps(plan: Plan, prepared: Prepared) -> Plan:
    """Returns a plan with the number of steps that its epochs take."""
    if plan.recipe.train.epochs is None:
        return plan
    steps = -(-plan.recipe.train.sequences(prepared.train_sequences) // plan.batch.global_batch_size)
    return plan.model_copy(update={"recipe": plan.recipe.with_(**{"train.max_steps": max(1, steps)})})


class BatchLoader:
    """Loads the batches of one data parallel rank; `rows_of` says which rows of a global batch are its own."""

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
        ends_after: int = 0,
        shortens: bool = False,
        items: Items | None = None,
        neftune_alpha: float = 0.0,
    ) -> None:
        """ends_after: number of sequences after which a batch has only those that are left, and the next batch starts
        over; 0: batches always continue from one epoch into the next.
        shortens: leave out the columns of a micro-batch after its last target, which no loss of a causal model reads.
        items: counts what the loss is a mean over, if the data do not tell. neftune_alpha: `train.neftune_alpha`.

        Raises DataError if a source has fewer sequences than one global batch takes from it."""
        self._prepared = prepared
        self._seed = seed
        self._global = global_batch_size
        self._micro = micro_batch_size
        self._steps = gradient_accumulation_steps
        self._rank = dp_rank
        self._size = dp_size
        self._shortens = shortens
        self._items = items or Items()
        self._alpha = neftune_alpha
        self._end = ends_after
        self._mixture = Mixture([source.weight for source in prepared.sources])
        self._train = [source.train for source in prepared.sources]
        self._check_sizes()

    @classmethod
    def of(cls, plan: Plan, prepared: Prepared, dp_rank: int) -> Self:
        """Returns the batches that a plan gives to a data parallel rank."""
        return cls(
            prepared,
            seed=plan.recipe.train.seed,
            global_batch_size=plan.batch.global_batch_size,
            micro_batch_size=plan.read_size,
            gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
            dp_rank=dp_rank,
            dp_size=plan.readers,
            ends_after=plan.recipe.train.sequences(prepared.train_sequences),
            shortens=plan.shortens_batches,
            items=Items(plan.recipe),
            neftune_alpha=plan.recipe.train.neftune_alpha,
        )

    def sample_ids(self, cursor: int, samples: int) -> tuple[Index, Index]:
        """Returns the sources, and the sequences within them, of training samples `cursor` to `cursor + samples`."""
        sources, numbers = self._mixture.locate(np.arange(cursor, cursor + samples))
        sequences = np.empty_like(numbers)
        for number, source in enumerate(self._prepared.sources):
            in_source = sources == number
            sequences[in_source] = _permuted(numbers[in_source], source, self._seed)
        return sources, sequences

    def train_batch(self, cursor: int) -> StepBatch:
        """Returns the batch that begins with sample `cursor`, counted from 0."""
        samples = self._global
        if cursor < self._end:
            samples = min(samples, self._end - cursor)
        sources, sequences = self.sample_ids(cursor, samples)
        # The disk reads the counts of targets while this rank's rows are assembled.
        for number, view in enumerate(self._train):
            view.prefetch_counts(sequences[sources == number])
        batch = self._step_batch(self._train, sources, sequences, self._steps, cursor)
        return replace(batch, micro_batches=self._with_noise(batch.micro_batches, cursor)) if self._alpha else batch

    def train_batches(self, cursor: int) -> Generator[StepBatch]:
        """Yields batches from sample `cursor` on, without end, prefetched in a thread; close it to stop."""
        return prefetched(self._train_batches(cursor))

    @property
    def eval_sets(self) -> list[str]:
        """The names of the evaluation sets; the first one is `MAIN_SET`."""
        return [MAIN_SET, *self._prepared.sets]

    def eval_batches(self, max_sequences: int | None = None, name: str = MAIN_SET) -> Iterator[StepBatch]:
        """Yields the first `max_sequences` sequences of an evaluation set (default all), one micro batch per rank and
        step.

        The order is the same in every run, source by source. Rows without targets fill the last batch of each source.
        """
        return prefetched(self._eval_batches(max_sequences, name))

    def eval_bytes(self, max_sequences: int | None = None, name: str = MAIN_SET) -> int | None:
        """Returns the UTF-8 bytes of the targets of `eval_batches`; None if the tokenizer does not define them."""
        sizes = self._token_bytes
        if sizes is None:
            return None
        rows = self._prepared.eval_order(name).read(max_sequences)
        return sum(int(sizes[batch.labels[batch.labels >= 0]].sum()) for batch in rows)

    @cached_property
    def _token_bytes(self) -> Index | None:
        return token_bytes(self._prepared.tokenizer.folder, self._prepared.tokenizer.vocab_size)

    def passes(self, view: Samples, sequences: Index) -> Iterator[tuple[Index, StepBatch]]:
        """Yields sequences of a view as `eval_batches` does, each batch with the sequences of this rank's rows."""
        size = self._micro * self._size
        for start in range(0, len(sequences), size):
            of_batch = sequences[start : start + size]
            batch = self._step_batch([view], np.zeros_like(of_batch), of_batch, 1, start)
            yield of_batch[rows_of(0, self._rank, self._size, self._micro)], batch

    def _with_noise(self, micro_batches: list[MicroBatch], cursor: int) -> list[MicroBatch]:
        """Adds the seeds of the noise to this rank's micro-batches of a step that begins with sample `cursor`."""
        noisy = []
        for step, batch in enumerate(micro_batches):
            rows = rows_of(step, self._rank, self._size, self._micro)
            # Below 2^63, and different for each sample of a run: a run has fewer than 2^40 samples.
            seeds = ((self._seed % 2**23 << 40) + cursor + row for row in range(rows.start, rows.stop))
            noise = EmbeddingNoise(self._alpha, tuple(seeds), self._prepared.sequence_length)
            noisy.append(replace(batch, noise=noise))
        return noisy

    def _train_batches(self, cursor: int) -> Iterator[StepBatch]:
        while True:
            batch = self.train_batch(cursor)
            yield batch
            cursor += batch.samples

    def _eval_batches(self, max_sequences: int | None, name: str) -> Iterator[StepBatch]:
        evaluated = self._prepared.evaluated(name)
        first = 0
        for number, sequences in self._prepared.eval_order(name).by_source(max_sequences):
            for _, batch in self.passes(evaluated[number].eval, sequences):
                yield replace(batch, eval_source=evaluated[number].name, first_sample=first + batch.first_sample)
            first += len(sequences)

    def _step_batch(
        self, views: list[Samples], sources: Index, sequences: Index, micro_steps: int, cursor: int
    ) -> StepBatch:
        """Reads the batch of the given sequences, each of which is in the view of its source."""
        others = [view.mismatched for view in views if isinstance(view, PackedSamples) and view.mismatched is not None]
        targets, examples = _counts(views, sources, sequences, self._items)
        return StepBatch(
            self._micro_batches(views, sources, sequences, micro_steps),
            targets,
            len(sequences),
            cursor,
            examples=examples,
            mismatched=self._micro_batches(others, sources, sequences, micro_steps) if others else [],
        )

    def _micro_batches(
        self, views: Sequence[Samples], sources: Index, sequences: Index, steps: int
    ) -> list[MicroBatch]:
        """Reads this rank's sequences of `steps` micro steps; missing rows are padding."""
        numbers = np.arange(len(sources))
        rows = np.concatenate([numbers[rows_of(step, self._rank, self._size, self._micro)] for step in range(steps)])
        sources, sequences = sources[rows], sequences[rows]
        of_completions = [view for view in views if isinstance(view, PackedSamples) and view.of_completions]
        most = max((view.most_segments for view in of_completions), default=0)
        columns = max((len(view.stream.loss_columns) for view in views), default=0)
        batch = empty_rows(steps * self._micro, self._prepared.sequence_length, self._prepared.eos_id, most, columns)
        processor = self._prepared.images
        images: list[list[tuple[int, bytes]]] = [[] for _ in rows]
        for number, view in enumerate(views):
            rows_of_source = np.flatnonzero(sources == number)
            if processor:
                for row, found in zip(rows_of_source, view.read_images(sequences[rows_of_source]), strict=True):
                    images[row] = found
            if rows_of_source.size:
                for target, values in zip(batch, view.read(sequences[rows_of_source]), strict=True):
                    if target is not None and values is not None:
                        target[rows_of_source, : values.shape[1]] = values
        shortens = self._shortens and not any(images)  # an image after the last target would be cut
        batches = _tensors(batch, steps, shortens)
        if processor is None:
            return batches
        images += [[] for _ in range(steps * self._micro - len(images))]
        of_steps = [images[step * self._micro : (step + 1) * self._micro] for step in range(steps)]
        return [
            replace(one, images=processor.images(of_step, one.input_ids, one.position_ids))
            for one, of_step in zip(batches, of_steps, strict=True)
        ]

    def _check_sizes(self) -> None:
        problems = []
        for number, source in enumerate(self._prepared.sources):
            needed = self._mixture.share(number, self._global)
            if len(source.train) < needed:
                message = (
                    f"'{source.name}' has {len(source.train):,} training sequences of "
                    f"{self._prepared.sequence_length} tokens, but one global batch takes {needed:,} of them"
                )
                fix = "add more text, or lower batch.global_batch_size or data.sequence_length"
                problems.append(Problem("data.short", f"data.sources.{number}", message, fix))
        if problems:
            raise DataError(problems)


def _permuted(numbers: Index, source: PreparedSource, seed: int) -> Index:
    """Returns the n-th sequence drawn from a source for each n; each epoch has its own order."""
    size = len(source.train)
    epochs, positions = np.divmod(numbers, size)
    # Epochs are sorted. Not `np.unique`: its first call imports `numpy.ma`, which takes longer than the first batch.
    for epoch in range(epochs[0], epochs[-1] + 1) if epochs.size else ():
        in_epoch = epochs == epoch
        positions[in_epoch] = permute(positions[in_epoch], size, permutation_key(seed, source.key, epoch))
    return positions


def _counts(views: list[Samples], sources: Index, sequences: Index, items: Items) -> tuple[int, int | None]:
    """Returns the number of labels other than `NO_TARGET` in the sequences, and that of items (`Items.count`)."""
    by_view = [(view, sequences[sources == number]) for number, view in enumerate(views)]
    targets = sum(int(view.count_targets(index).sum()) for view, index in by_view)
    examples = [items.count(view, index) for view, index in by_view]
    return targets, None if examples[0] is None else sum(count or 0 for count in examples)


def _tensors(rows: Rows, steps: int, shortens: bool) -> list[MicroBatch]:
    """Splits rows into `steps` micro steps of equal size."""
    # Imported here: preparing data, in a launcher, must not load torch.
    import torch

    columns = [[None] * steps if array is None else torch.from_numpy(array).chunk(steps) for array in rows]
    batches = []
    for inputs, positions, labels, segments, *others, values in zip(*columns, strict=True):
        completions = None if segments is None else Completions.of(segments, labels, *others)
        if shortens:
            targets = (labels >= 0).any(dim=0).nonzero()
            used = int(targets[-1]) + 1 if len(targets) else 1
            size = -(-used // SHORTENED_TO) * SHORTENED_TO
            inputs, positions, labels = (tensor[:, :size].contiguous() for tensor in (inputs, positions, labels))
            values = None if values is None else values[:, :size].contiguous()
        batches.append(MicroBatch(inputs, positions, labels, completions, values))
    for batch in batches:
        _ = batch.documents  # computed in the reading thread: between kernels it would take ten times as long
    return batches
