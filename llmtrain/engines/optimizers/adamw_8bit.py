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
from llmtrain.engines.optimizers.matrices import MatrixPart, parts_of
from llmtrain.engines.optimizers.sums import SharedSums
from llmtrain.engines.runtime.agree import gather
from llmtrain.engines.state.pieces import Box, Region
from llmtrain.engines.state.save_load import HeldLists, PlaceOf
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
    for values in ([*(-one for one in reversed(positive)), 0.0, *positive], [0.0, *fractions(2)]):
        borders = [(low + high) / 2 for low, high in pairwise(values)]
        tables += [*values, values[-1], *borders]  # the last code is not used
        lengths += [len(values) + 1, len(borders)]
    tables[-lengths[-1]] = 0.0  # the border between 0 and the smallest second moment
    first, below, second, between = torch.split(torch.tensor(tables, device=device), lengths)
    return Codes(first, below), Codes(second, between)


class RowRange:
    """A flat range of held rows."""

    def __init__(self, rows: HeldRows, start: int, first: int, end: int) -> None:
        """start: the element with which the rank's part begins. first, end: the range."""
        blocks, before = rows.blocks(first, end), rows.number(start)
        self.elements = slice(first - start, end - start)
        """Its elements, within the part."""
        self.blocks = slice(blocks.start - before, blocks.stop - before)
        """Its blocks, within those of the part."""
        self._rows, above = rows, first // rows.elements
        self._number = -(-end // rows.elements) - above
        self._range = slice(first - above * rows.elements, end - above * rows.elements)
        skipped = above * len(rows.held)
        self._blocks = slice(blocks.start - skipped, blocks.stop - skipped)

    def largest(self, values: Tensor) -> Tensor:
        """Returns the largest magnitude in each block, [blocks], of the values of all elements, [elements]."""
        rows, block = self._rows, self._rows.block
        whole = _padded(values, self._range, self._number * rows.elements).view(self._number, rows.elements)
        found = []
        parts = torch.split(whole, [number for _, number in rows.columns], 1)
        for (first, number), part in zip(rows.columns, parts, strict=True):
            beside = first % block, -(first + number) % block
            padded = pad(part, beside) if any(beside) else part
            found.append(torch.linalg.vector_norm(padded.reshape(self._number, -1, block), math.inf, -1))
        return _joined(found).view(-1)[self._blocks]

    def spread(self, values: Tensor) -> Tensor:
        """Returns the values of blocks, [blocks], as one for each element, [elements]."""
        rows, block = self._rows, self._rows.block
        whole = _padded(values, self._blocks, self._number * len(rows.held)).view(self._number, len(rows.held))
        found = []
        parts = torch.split(whole, [number for _, number in rows.spans], 1)
        for (first, number), part in zip(rows.columns, parts, strict=True):
            alike = part[:, :, None].expand(-1, -1, block).reshape(self._number, -1)
            found.append(alike[:, first % block : first % block + number])
        return _joined(found).reshape(-1)[self._range]


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


class HeldBlocks:
    """What a rank holds of a matrix, and the scales of the blocks in which it holds elements."""

    def __init__(self, part: MatrixPart, block: int) -> None:
        region, last = part.region, len(part.region.shape) - 1
        boxes = region.boxes if region.dim == last else region.boxes[:1]
        columns = tuple((box.first[last], box.size[last]) for box in boxes)
        self.rows = rows = HeldRows(region.shape[last], columns, block)
        lines = region.over(range(last))
        self.name = f"{part.name} {[(box.first, box.size) for box in lines.boxes]}"
        """Equal on all ranks that hold parts of these rows."""
        self._held = slice(part.offset, part.offset + part.length)
        self._lines, self._start, self._end = lines.numel, part.start, part.start + part.length
        self._blocks = rows.blocks(self._start, self._end)
        self.number = len(self._blocks)
        self.cuts: Cuts = (
            rows.cut,
            frozenset(rows.place(rows.number(end)) for end in (self._start, self._end) if rows.is_cut(end)),
        )
        placed = (
            Box((*box.first[:-1], first), (*box.size[:-1], blocks))
            for box, (first, blocks) in zip(region.boxes, cycle(rows.spans), strict=False)
        )
        self.region = Region((*region.shape[:-1], rows.in_row), tuple(placed), region.dim)
        """The blocks' region in a tensor that has an element for each block of the whole weight."""
        self.first = self._blocks.start
        """Index of the first block within the flat region."""
        self.scales: Tensor
        """[moments, blocks]."""
        self._pairs: list[tuple[slice, slice]] = []
        self.width = 0
        """Number of values that ranks exchange for all of these rows."""

    def of(self, trained: Tensor) -> Tensor:
        """Returns this part of a trained tensor, of its gradient or of codes, flat."""
        return local(trained).view(-1)[self._held]

    def stretches(self) -> Iterator[RowRange]:
        """Yields the whole part in ranges that are each updated at once."""
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

    def share(self, cuts: Cuts) -> None:
        """Learns which blocks of these rows are divided among ranks."""
        every, others = sorted(cuts[0]), sorted(one for one in cuts[1] if one[1] not in cuts[0])
        self.width = self._lines * len(every) + len(others)
        period, before = len(self.rows.held), self._blocks.start
        for own, block in enumerate(self.rows.held):
            numbers = range((own - before) % period, self.number, period)
            if block in every and numbers:
                first = self.rows.place(numbers[0] + before)[0] * len(every) + every.index(block)
                end = first + (len(numbers) - 1) * len(every) + 1
                self._pairs.append((slice(numbers[0], self.number, period), slice(first, end, len(every))))
        for place, (row, block) in enumerate(others, self._lines * len(every)):
            for own, held in enumerate(self.rows.held):
                number = row * period + own - before
                if held == block and 0 <= number < self.number:
                    self._pairs.append((slice(number, number + 1), slice(place, place + 1)))

    def exchanged(self, largest: Tensor) -> Tensor:
        """Returns this rank's contribution to the exchange for all of these rows, flat; the rest is 0.

        largest: the largest magnitudes in this part, [moments, blocks].
        """
        shared = largest.new_zeros(len(largest), self.width)
        for own, place in self._pairs:
            shared[:, place] = torch.maximum(shared[:, place], largest[:, own])
        return shared.view(-1)

    def agreed(self, shared: Tensor, largest: Tensor) -> None:
        """Writes the values that ranks have agreed on to `largest`, for this part's blocks."""
        for own, place in self._pairs:
            largest[:, own] = shared.view(len(largest), -1)[:, place]


class AdamW8bit(GuardedOptimizer):
    """AdamW for groups of matrices, which have `quantized`, and for groups of vectors."""

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, **{"quantized": False, **defaults})
        self._factors: dict[nn.Parameter, dict[str, Factor]] = {}

    def find_parts(self, trained: list[Tensor], lists: HeldLists, place: PlaceOf, device: torch.device) -> None:
        """Learns which parts of weights this rank holds, and makes their scales; called before the first step.

        trained, lists, place: as for `parts_of`. device: where largest magnitudes are exchanged.
        """
        self._device = device
        self._parts: dict[int, list[HeldBlocks]] = {id(one): [] for one in trained}
        block = self.defaults["block"]
        found = [
            (held, part, HeldBlocks(part, block))
            for held, part in parts_of(trained, lists, place)
            if part.length and len(part.shape) > 1
        ]
        if not found:
            return
        like = found[0][0].tensors[WEIGHT]
        self._codes = codes_of_moments(like.device)
        scales = like.new_zeros(len(SCALES), sum(blocks.number for _, _, blocks in found))
        parts = torch.split(scales, [one.number for _, _, one in found], 1)
        for (held, _, blocks), own in zip(found, parts, strict=True):
            blocks.scales = own
            self._parts[id(held.trained)].append(blocks)
            self._factors[held.parameter] = {
                kind: Factor(blocks.region, blocks.first, values) for kind, values in zip(SCALES, own, strict=True)
            }

    def factors(self, parameter: nn.Parameter) -> dict[str, Factor]:
        """Returns the scales of a matrix."""
        return self._factors.get(parameter, {})

    def connect(self) -> None:
        """Learns which blocks ranks have to agree on."""
        parts = [one for some in self._parts.values() for one in some]
        cuts: dict[str, Cuts] = {}
        for own in gather({one.name: one.cuts for one in parts if any(one.cuts)}):
            for name, (every, others) in own.items():
                known = cuts.get(name, (frozenset[int](), frozenset[tuple[int, int]]()))
                cuts[name] = known[0] | every, known[1] | others
        for one in parts:
            if any(one.cuts):
                one.share(cuts[one.name])
        widths = [{one.name: len(CODES) * one.width for one in some if one.width} for some in self._parts.values()]
        self._largest = SharedSums(widths, self._device, dist.ReduceOp.MAX)

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
            update_by_adamw(group, trained, [self.state[one] for one in trained], keep)
            return
        for one in trained:
            self.state[one]["step"] += keep
        parts = [(part, one) for one in trained for part in self._parts[id(one)]]
        agreed = self._agreed(group, parts)
        for part, one in parts:
            weight, gradient, codes = part.of(one), part.of(one.grad), self._codes_of(part, one)  # type: ignore[arg-type]
            count = self.state[one]["step"].clamp(min=1)
            first, second = (1 - beta**count for beta in group["betas"])  # total weight of the gradients in a moment
            rate, kept = group["lr"] * keep, keep.bool()
            for stretch in part.stretches():
                moments = self._moved(group, part, stretch, gradient, codes)
                self._round(part, stretch, moments, codes, agreed.get(part.name), kept)
                size = moments[1].sqrt_().div_(second.sqrt()).add_(group["eps"])
                own = weight[stretch.elements]
                own.mul_(1 - rate * group["weight_decay"])
                own.sub_(moments[0].div_(size).mul_(rate / first))

    def _codes_of(self, part: HeldBlocks, trained: Tensor) -> list[Tensor]:
        return [part.of(self.state[trained][kind]) for kind in CODES]

    def _agreed(self, group: dict[str, Any], parts: list[tuple[HeldBlocks, Tensor]]) -> dict[str, Tensor]:
        """Returns the largest magnitudes in blocks that are divided among ranks, by the names of rows.

        They are computed first, from moments that are computed again afterwards, because memory has no room for these.
        """
        shared = [(part, one) for part, one in parts if part.width]
        largest = {part.name: torch.zeros_like(part.scales) for part, _ in shared}
        for part, one in shared:
            for stretch in part.shared():
                moments = self._moved(group, part, stretch, part.of(one.grad), self._codes_of(part, one))  # type: ignore[arg-type]
                for own, moment in zip(largest[part.name], moments, strict=True):
                    own[stretch.blocks] = stretch.largest(moment)
        found = self._largest.over_ranks({part.name: part.exchanged(largest[part.name]) for part, _ in shared})
        for part, _ in shared:
            part.agreed(found[part.name], largest[part.name])
        return largest

    def _moved(
        self, group: dict[str, Any], part: HeldBlocks, stretch: RowRange, gradient: Tensor, codes: list[Tensor]
    ) -> list[Tensor]:
        """Returns both moments with a new gradient, not rounded."""
        own, moved = gradient[stretch.elements], []
        for number, beta in enumerate(group["betas"]):
            old = self._codes[number].fractions(codes[number][stretch.elements])
            old.mul_(stretch.spread(part.scales[number, stretch.blocks]))
            moved.append(old.mul_(beta).add_((own.square() if number else own) * (1 - beta)))
        return moved

    def _round(
        self,
        part: HeldBlocks,
        stretch: RowRange,
        moments: list[Tensor],
        codes: list[Tensor],
        agreed: Tensor | None,
        kept: Tensor,
    ) -> None:
        """Keeps moments in 8 bits.

        agreed: largest magnitudes over all ranks, [moments, blocks of this part]. kept: whether the update counts.
        """
        for number, moment in enumerate(moments):
            largest = stretch.largest(moment)
            if agreed is not None:
                largest = torch.maximum(largest, agreed[number, stretch.blocks])
            divisor = torch.where(largest > 0, largest, 1.0)
            new = self._codes[number].nearest(moment / stretch.spread(divisor))
            for held, value in (
                (codes[number][stretch.elements], new),
                (part.scales[number, stretch.blocks], largest),
            ):
                held.copy_(torch.where(kept, value, held))
