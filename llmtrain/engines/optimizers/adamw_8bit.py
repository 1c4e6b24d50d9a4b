"""AdamW whose moments are kept in 8 bits, by blocks of 256 elements of a row (arXiv 2110.02861).

A block has a scale, the largest magnitude in it, and a byte for each element, which stands for a fraction of that. The
update is computed in fp32, from moments that are not rounded yet. Blocks begin at fixed columns of the whole weight.
Where ranks hold parts of a block, they exchange its largest magnitudes, so that every plan rounds alike.

Multiplications and additions are operations of their own, each correctly rounded. A kernel that joins them may round
the elements at the end of a tensor in another way, and a rank's part ends elsewhere under every plan.

Vectors keep fp32 moments: they are less than a thousandth of a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import cycle, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import pad

from llmtrain.engines.optimizers.guarded import Factor, GuardedOptimizer, update_by_adamw
from llmtrain.engines.optimizers.matrices import LocatedShard, located_shards
from llmtrain.engines.optimizers.sums import SharedSums
from llmtrain.engines.runtime.agree import gather
from llmtrain.engines.state.optimizer_shards import OptimizerShardLists
from llmtrain.engines.state.save_load import Locate
from llmtrain.engines.state.shards import Chunk, WeightSlice
from llmtrain.overrides.torch import local
from llmtrain.plan.facts.weights import HeldRows
from llmtrain.plan.optimizers import OPTIMIZERS, STRETCH
from llmtrain.system.piece_headers import WEIGHT

CODES, SCALES = OPTIMIZERS["adamw_8bit"].codes, OPTIMIZERS["adamw_8bit"].scales
DECADES = 7
"""Powers of ten between the smallest and the largest fraction."""


def fractions(first: int) -> list[float]:
    """Returns the positive fractions of the dynamic map (section 2.2 of the paper), `first` · 127 of them.

    Each decade has twice as many as the one below, at equal distances. The map has the upper end of each interval where
    the paper has its middle: the largest fraction is then 1, so that a block's largest element is exact. first: number
    of fractions in the lowest decade.
    """
    numbers = [first * 2**decade for decade in range(DECADES)]
    return [
        10.0 ** (decade + 1 - DECADES) * (0.1 + 0.9 * (index + 1) / number)
        for decade, number in enumerate(numbers)
        for index in range(number)
    ]


class Codes:
    """The values that the bytes of a moment stand for, and the rounding to them."""

    def __init__(self, values: Tensor, borders: Tensor) -> None:
        """values: of all codes, in ascending order. borders: between neighbouring values."""
        self._values, self._borders = values, borders

    def fractions(self, codes: Tensor) -> Tensor:
        """Returns the values of codes."""
        return self._values.index_select(0, codes.int())

    def nearest(self, fractions: Tensor) -> Tensor:
        """Returns the codes of the nearest values."""
        return torch.bucketize(fractions, self._borders, out_int32=True).to(torch.uint8)


def codes_of_moments(device: torch.device) -> tuple[Codes, Codes]:
    """Returns the codes of the first moment, which has a sign, and of the second one.

    A second moment that is not 0 never becomes 0, because the step would then be divided by `eps` alone.
    """
    positive = fractions(1)
    tables, lengths = [], []
    for values in ([*(-fraction for fraction in reversed(positive)), 0.0, *positive], [0.0, *fractions(2)]):
        borders = [(low + high) / 2 for low, high in pairwise(values)]
        tables += [*values, values[-1], *borders]  # the last code is not used
        lengths += [len(values) + 1, len(borders)]
    tables[-lengths[-1]] = 0.0  # the border between 0 and the smallest second moment
    first, first_borders, second, second_borders = torch.split(torch.tensor(tables, device=device), lengths)
    return Codes(first, first_borders), Codes(second, second_borders)


class RowRange:
    """A flat range of the rows of a slice."""

    def __init__(self, rows: HeldRows, start: int, first: int, end: int) -> None:
        """start: the element with which the rank's shard begins. first, end: the range."""
        blocks, before = rows.blocks(first, end), rows.number(start)
        self.elements = slice(first - start, end - start)
        """Its elements, within the shard."""
        self.blocks = slice(blocks.start - before, blocks.stop - before)
        """Its blocks, within those of the shard."""
        self._rows, above = rows, first // rows.elements
        self._number = -(-end // rows.elements) - above
        self._range = slice(first - above * rows.elements, end - above * rows.elements)
        skipped = above * len(rows.held)
        self._blocks = slice(blocks.start - skipped, blocks.stop - skipped)

    def largest(self, values: Tensor) -> Tensor:
        """Returns the largest magnitude in each block, [blocks], of the values of all elements, [elements]."""
        rows, block = self._rows, self._rows.block
        whole = _padded(values, self._range, self._number * rows.elements).view(self._number, rows.elements)
        largest = []
        parts = torch.split(whole, [number for _, number in rows.columns], 1)
        for (first, number), part in zip(rows.columns, parts, strict=True):
            padding = first % block, -(first + number) % block
            padded = pad(part, padding) if any(padding) else part
            largest.append(torch.linalg.vector_norm(padded.reshape(self._number, -1, block), math.inf, -1))
        return _joined(largest).view(-1)[self._blocks]

    def spread(self, values: Tensor) -> Tensor:
        """Returns the values of blocks, [blocks], as one for each element, [elements]."""
        rows, block = self._rows, self._rows.block
        whole = _padded(values, self._blocks, self._number * len(rows.held)).view(self._number, len(rows.held))
        spread = []
        parts = torch.split(whole, [number for _, number in rows.spans], 1)
        for (first, number), part in zip(rows.columns, parts, strict=True):
            repeated = part[:, :, None].expand(-1, -1, block).reshape(self._number, -1)
            spread.append(repeated[:, first % block : first % block + number])
        return _joined(spread).reshape(-1)[self._range]


def _padded(values: Tensor, within: slice, size: int) -> Tensor:
    """Returns a flat tensor of `size` elements: the values at `within`, and zeros elsewhere."""
    if values.numel() == size:
        return values
    padded = values.new_zeros(size)
    padded[within] = values
    return padded


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


Cuts = tuple[frozenset[int], frozenset[tuple[int, int]]]
"""Blocks that are divided among ranks: (those divided in every row, others as (row, block of the row))."""


class QuantizedShard:
    """A rank's shard of a matrix, and the scales of the blocks in which it has elements."""

    def __init__(self, shard: LocatedShard, block: int) -> None:
        weight_slice, last = shard.weight_slice, len(shard.weight_slice.shape) - 1
        chunks = weight_slice.chunks if weight_slice.dim == last else weight_slice.chunks[:1]
        columns = tuple((chunk.offsets[last], chunk.sizes[last]) for chunk in chunks)
        self.rows = rows = HeldRows(weight_slice.shape[last], columns, block)
        row_slice = weight_slice.project(range(last))
        self.name = f"{shard.name} {[(chunk.offsets, chunk.sizes) for chunk in row_slice.chunks]}"
        """Equal on all ranks that hold shards of these rows."""
        self._range = slice(shard.offset, shard.offset + shard.length)
        self._num_rows, self._start, self._end = row_slice.numel, shard.start, shard.start + shard.length
        self._blocks = rows.blocks(self._start, self._end)
        self.number = len(self._blocks)
        self.cuts: Cuts = (
            rows.cut,
            frozenset(rows.place(rows.number(end)) for end in (self._start, self._end) if rows.is_cut(end)),
        )
        block_chunks = (
            Chunk((*chunk.offsets[:-1], first), (*chunk.sizes[:-1], blocks))
            for chunk, (first, blocks) in zip(weight_slice.chunks, cycle(rows.spans), strict=False)
        )
        self.weight_slice = WeightSlice((*weight_slice.shape[:-1], rows.in_row), tuple(block_chunks), weight_slice.dim)
        """The slice of these blocks in a tensor that has an element for each block of the whole weight."""
        self.first = self._blocks.start
        """Index of the first block within the flat slice."""
        self.scales: Tensor
        """[moments, blocks]."""
        self._shared: list[tuple[slice, slice]] = []
        """Blocks that other ranks share: (their indices in this shard, and in what ranks exchange)."""
        self.width = 0
        """Number of values that ranks exchange for all of these rows."""

    def of(self, trained: Tensor) -> Tensor:
        """Returns this shard of a trained tensor, of its gradient or of codes, flat."""
        return local(trained).view(-1)[self._range]

    def stretches(self) -> Iterator[RowRange]:
        """Yields the whole shard in ranges that are each updated at once."""
        size = max(STRETCH // self.rows.elements, 1) * self.rows.elements
        for first in range(self._start // size * size, self._end, size):
            yield self._stretch(first, first + size)

    def shared(self) -> Iterator[RowRange]:
        """Yields ranges that contain all blocks of which other ranks hold parts."""
        if self.rows.cut:
            yield from self.stretches()
            return
        row = self.rows.elements
        for end in (self._start, self._end):
            if self.rows.is_cut(end):
                yield self._stretch(end // row * row, end // row * row + row)

    def _stretch(self, first: int, end: int) -> RowRange:
        return RowRange(self.rows, self._start, max(first, self._start), min(end, self._end))

    def find_shared(self, cuts: Cuts) -> None:
        """Learns which blocks of these rows are divided among ranks."""
        in_every_row = sorted(cuts[0])
        others = sorted((row, block) for row, block in cuts[1] if block not in cuts[0])
        self.width = self._num_rows * len(in_every_row) + len(others)
        period, before = len(self.rows.held), self._blocks.start
        for position, block in enumerate(self.rows.held):
            numbers = range((position - before) % period, self.number, period)
            if block in in_every_row and numbers:
                row = self.rows.place(numbers[0] + before)[0]
                first = row * len(in_every_row) + in_every_row.index(block)
                end = first + (len(numbers) - 1) * len(in_every_row) + 1
                own, exchanged = slice(numbers[0], self.number, period), slice(first, end, len(in_every_row))
                self._shared.append((own, exchanged))
        for index, (row, block) in enumerate(others, self._num_rows * len(in_every_row)):
            for position, own_block in enumerate(self.rows.held):
                number = row * period + position - before
                if own_block == block and 0 <= number < self.number:
                    self._shared.append((slice(number, number + 1), slice(index, index + 1)))

    def to_exchange(self, largest: Tensor) -> Tensor:
        """Returns what this rank sends to the exchange for all of these rows, flat; what it does not hold is 0.

        largest: the largest magnitudes in this shard, [moments, blocks].
        """
        exchanged = largest.new_zeros(len(largest), self.width)
        for own, index in self._shared:
            exchanged[:, index] = torch.maximum(exchanged[:, index], largest[:, own])
        return exchanged.view(-1)

    def from_exchange(self, exchanged: Tensor, largest: Tensor) -> None:
        """Writes the maxima over ranks to `largest`, for this shard's blocks."""
        for own, index in self._shared:
            largest[:, own] = exchanged.view(len(largest), -1)[:, index]


class AdamW8bit(GuardedOptimizer):
    """AdamW for groups of matrices, which have `quantized`, and for groups of vectors."""

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, **{"quantized": False, **defaults})
        self._factors: dict[nn.Parameter, dict[str, Factor]] = {}

    def locate_shards(
        self, trained: list[Tensor], lists: OptimizerShardLists, locate: Locate, device: torch.device
    ) -> None:
        """Learns which shards of weights this rank holds, and makes their scales; called before the first step.

        trained, lists, locate: as for `located_shards`. device: where largest magnitudes are exchanged.
        """
        self._device = device
        self._shards: dict[int, list[QuantizedShard]] = {id(tensor): [] for tensor in trained}
        block = self.defaults["block"]
        pairs = [
            (optimizer_shard, QuantizedShard(located, block))
            for optimizer_shard, located in located_shards(trained, lists, locate)
            if located.length and len(located.shape) > 1
        ]
        if not pairs:
            return
        like = pairs[0][0].tensors[WEIGHT]
        self._codes = codes_of_moments(like.device)
        scales = like.new_zeros(len(SCALES), sum(shard.number for _, shard in pairs))
        parts = torch.split(scales, [shard.number for _, shard in pairs], 1)
        for (optimizer_shard, shard), part in zip(pairs, parts, strict=True):
            shard.scales = part
            self._shards[id(optimizer_shard.trained)].append(shard)
            self._factors[optimizer_shard.parameter] = {
                kind: Factor(shard.weight_slice, shard.first, values) for kind, values in zip(SCALES, part, strict=True)
            }

    def factors(self, parameter: nn.Parameter) -> dict[str, Factor]:
        """Returns the scales of a matrix."""
        return self._factors.get(parameter, {})

    def connect(self) -> None:
        """Learns for which blocks ranks have to exchange the largest magnitudes."""
        shards = [shard for shards in self._shards.values() for shard in shards]
        cuts: dict[str, Cuts] = {}
        for cuts_of_rank in gather({shard.name: shard.cuts for shard in shards if any(shard.cuts)}):
            for name, (in_every_row, others) in cuts_of_rank.items():
                known = cuts.get(name, (frozenset[int](), frozenset[tuple[int, int]]()))
                cuts[name] = known[0] | in_every_row, known[1] | others
        for shard in shards:
            if any(shard.cuts):
                shard.find_shared(cuts[shard.name])
        counts = [
            {shard.name: len(CODES) * shard.width for shard in shards if shard.width}
            for shards in self._shards.values()
        ]
        self._maxima = SharedSums(counts, self._device, dist.ReduceOp.MAX)

    def kinds(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the codes of both moments, or the moments of vectors."""
        return CODES if group["quantized"] else ("exp_avg", "exp_avg_sq")

    def first_state(self, group: dict[str, Any], trained: Tensor) -> dict[str, Any]:
        """Adds the count of updates. Codes are bytes."""
        count = torch.zeros((), dtype=torch.float32, device=trained.device)
        dtype = torch.uint8 if group["quantized"] else trained.dtype
        return {"step": count} | {kind: torch.zeros_like(trained, dtype=dtype) for kind in self.kinds(group)}

    def update(self, group: dict[str, Any], trained: list[Tensor], keep: Tensor) -> None:
        """Updates the weights of a group."""
        if not group["quantized"]:
            update_by_adamw(group, trained, [self.state[tensor] for tensor in trained], keep)
            return
        for tensor in trained:
            self.state[tensor]["step"] += keep
        pairs = [(shard, tensor) for tensor in trained for shard in self._shards[id(tensor)]]
        maxima = self._shared_maxima(group, pairs)
        for shard, tensor in pairs:
            weight, gradient, codes = shard.of(tensor), shard.of(tensor.grad), self._codes_of(shard, tensor)  # type: ignore[arg-type]
            count = self.state[tensor]["step"].clamp(min=1)
            first, second = (1 - beta**count for beta in group["betas"])  # total weight of the gradients in a moment
            rate, is_kept = group["lr"] * keep, keep.bool()
            for stretch in shard.stretches():
                moments = self._moments(group, shard, stretch, gradient, codes)
                self._round(shard, stretch, moments, codes, maxima.get(shard.name), is_kept)
                size = moments[1].sqrt_().div_(second.sqrt()).add_(group["eps"])
                part = weight[stretch.elements]
                part.mul_(1 - rate * group["weight_decay"])
                part.sub_(moments[0].div_(size).mul_(rate / first))

    def _codes_of(self, shard: QuantizedShard, trained: Tensor) -> list[Tensor]:
        return [shard.of(self.state[trained][kind]) for kind in CODES]

    def _shared_maxima(self, group: dict[str, Any], pairs: list[tuple[QuantizedShard, Tensor]]) -> dict[str, Tensor]:
        """Returns the largest magnitudes in blocks that are divided among ranks, by the names of rows.

        They are computed first, from moments that are computed again afterwards, because memory has no room for these.
        """
        pairs = [(shard, tensor) for shard, tensor in pairs if shard.width]
        largest = {shard.name: torch.zeros_like(shard.scales) for shard, _ in pairs}
        for shard, tensor in pairs:
            for stretch in shard.shared():
                moments = self._moments(group, shard, stretch, shard.of(tensor.grad), self._codes_of(shard, tensor))  # type: ignore[arg-type]
                for values, moment in zip(largest[shard.name], moments, strict=True):
                    values[stretch.blocks] = stretch.largest(moment)
        exchanged = self._maxima.reduce({shard.name: shard.to_exchange(largest[shard.name]) for shard, _ in pairs})
        for shard, _ in pairs:
            shard.from_exchange(exchanged[shard.name], largest[shard.name])
        return largest

    def _moments(
        self, group: dict[str, Any], shard: QuantizedShard, stretch: RowRange, gradient: Tensor, codes: list[Tensor]
    ) -> list[Tensor]:
        """Returns both moments after a new gradient, not rounded."""
        part, moments = gradient[stretch.elements], []
        for number, beta in enumerate(group["betas"]):
            moment = self._codes[number].fractions(codes[number][stretch.elements])
            moment.mul_(stretch.spread(shard.scales[number, stretch.blocks]))
            moments.append(moment.mul_(beta).add_((part.square() if number else part) * (1 - beta)))
        return moments

    def _round(
        self,
        shard: QuantizedShard,
        stretch: RowRange,
        moments: list[Tensor],
        codes: list[Tensor],
        maxima: Tensor | None,
        is_kept: Tensor,
    ) -> None:
        """Stores moments in 8 bits.

        maxima: largest magnitudes over all ranks, [moments, blocks of this shard]. is_kept: whether the update counts.
        """
        for number, moment in enumerate(moments):
            largest = stretch.largest(moment)
            if maxima is not None:
                largest = torch.maximum(largest, maxima[number, stretch.blocks])
            divisor = torch.where(largest > 0, largest, 1.0)
            new_codes = self._codes[number].nearest(moment / stretch.spread(divisor))
            for stored, value in (
                (codes[number][stretch.elements], new_codes),
                (shard.scales[number, stretch.blocks], largest),
            ):
                stored.copy_(torch.where(is_kept, value, stored))
