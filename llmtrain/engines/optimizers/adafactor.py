"""Adafactor (arXiv 1804.04235), as in torch: the second moment of a matrix is a product of its rows' and columns'.

An update takes two rounds of sums over the whole matrix: of squared gradients, along rows and columns, and then of the
squared update, by which it is clipped. Under ZeRO and tensor parallelism ranks hold parts of matrices, so they exchange
these sums (`sums.py`), which are vectors; no rank needs a whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.engines.optimizers.guarded import Factor, GuardedOptimizer
from llmtrain.engines.optimizers.matrices import MatrixPart, parts_of
from llmtrain.engines.optimizers.sums import SharedSums
from llmtrain.engines.state.pieces import Region
from llmtrain.engines.state.save_load import HeldLists, PlaceOf
from llmtrain.overrides.torch import local
from llmtrain.system.piece_headers import WEIGHT

ROWS, COLUMNS, VARIANCE = "row_var", "col_var", "variance"
"""Torch's names of the states: for a matrix, the mean squared gradient of each row and each column; for a vector, that
of each element."""


class MatrixRange:
    """A flat range of a region of a matrix, or of a stack of matrices, as the rows that contain it.

    Elements before and after the range, in its first and last row, are 0. If the range spans several matrices of a
    stack, the rows are those of whole matrices.
    """

    def __init__(self, part: MatrixPart, first: int, end: int) -> None:
        """first, end: the range within the part."""
        region, first, end = part.region, part.start + first, part.start + end
        last = len(region.shape) - 1
        is_stack = len(part.shape) > 2
        self._rows = region.over(range(last))
        self._columns = region.over((0, last) if is_stack else (last,))
        matrices = region.over((0,)).numel if is_stack else 1
        height, width = self._rows.numel // matrices, self._columns.numel // matrices
        above, below = first // width, -(-end // width)
        number = (below - 1) // height - above // height + 1
        if number > 1:
            above, below = above // height * height, -(-below // height) * height
        self._matrices = slice(above // height, above // height + number)
        self._lines = slice(above, below)
        self._size = number, (below - above) // number, width
        self._range = slice(first - above * width, end - above * width)

    def add_sums(self, squares: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Adds the sums of flat elements to those of the rows and columns of the whole weight."""
        padded = squares.new_zeros(self._size)
        padded.view(-1)[self._range] = squares
        own = self._rows.take(rows)
        own[self._lines] += padded.sum(-1).view(-1)
        self._rows.put(own, rows)
        own = self._columns.take(columns)
        own.view(-1, self._size[-1])[self._matrices] += padded.sum(-2)
        self._columns.put(own, columns)

    def product(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns the products of the rows' and the columns' values of the whole weight, flat, one for each element."""
        own = self._rows.take(rows)[self._lines].view(*self._size[:2], 1)
        across = self._columns.take(columns).view(-1, 1, self._size[-1])[self._matrices]
        return (own * across).view(-1)[self._range]


class HeldPart:
    """What a rank holds of a weight, and the factors of the whole weight if it is a matrix."""

    def __init__(self, part: MatrixPart, like: Tensor) -> None:
        """like: has the type and device of the factors."""
        self.name, self.elements = part.name, math.prod(part.shape)
        self._shape, self._held = part.shape, slice(part.offset, part.offset + part.length)
        first, end = part.share()
        self.share = slice(first, end)
        """The elements over which this copy sums."""
        self.factors: dict[str, Tensor] = {}
        if len(part.shape) > 1:
            *matrices, rows, columns = part.shape
            self.factors = {ROWS: like.new_zeros(*matrices, rows), COLUMNS: like.new_zeros(*matrices, columns)}
            self._whole = MatrixRange(part, 0, part.length)
            self._of_share = MatrixRange(part, first, end) if end > first else None
        self.widths = [*(one.numel() for one in self.factors.values()), 1]
        """Numbers of sums over the whole weight: of squared gradients by row, by column, and of the squared weight."""

    def of(self, trained: Tensor) -> Tensor:
        """Returns this part of a trained tensor, or of its gradient, flat."""
        return local(trained).view(-1)[self._held]

    def sums(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Returns this copy's share of the sums over the whole weight."""
        sums = weight.new_zeros(sum(self.widths))
        sums[-1] = weight[self.share].square().sum()
        if self.factors and self._of_share is not None:
            rows, columns, _ = torch.split(sums, self.widths)
            self._of_share.add_sums(gradient[self.share].square(), rows, columns)
        return sums

    def estimate(self, sums: Tensor, moved: Tensor, least: float) -> Tensor:
        """Moves the factors by a share towards the means of squared gradients; returns the second moment of this part.

        sums: over the whole matrix. least: lower bound of the divisor, the mean of the rows' factors.
        """
        rows, columns = self.factors.values()
        of_rows, of_columns, _ = torch.split(sums, self.widths)
        rows.lerp_(of_rows.view_as(rows) / self._shape[-1], moved)
        columns.lerp_(of_columns.view_as(columns) / self._shape[-2], moved)
        return self._whole.product(rows / rows.mean(-1, keepdim=True).clamp(min=least), columns)


class Adafactor(GuardedOptimizer):
    """Adafactor for groups of matrices, which have `factored`, and for groups of vectors."""

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, **{"factored": False, **defaults})
        self._of_parameter: dict[nn.Parameter, HeldPart] = {}

    def find_parts(self, trained: list[Tensor], lists: HeldLists, place: PlaceOf, device: torch.device) -> None:
        """Learns which parts of weights this rank holds, and makes their factors; called before the first step.

        trained, lists, place: as for `parts_of`. device: where sums are exchanged.
        """
        self._device = device
        self._parts: dict[int, list[HeldPart]] = {id(one): [] for one in trained}
        for held, description in parts_of(trained, lists, place):
            if description.length:
                part = HeldPart(description, held.tensors[WEIGHT])
                self._parts[id(held.trained)].append(part)
                self._of_parameter[held.parameter] = part

    def factors(self, parameter: nn.Parameter) -> dict[str, Factor]:
        """Returns the factors of a matrix."""
        part = self._of_parameter.get(parameter)
        factors = part.factors if part else {}
        return {kind: Factor(Region.whole(one.shape), 0, one.view(-1)) for kind, one in factors.items()}

    def connect(self) -> None:
        """Learns which ranks hold parts of the same weights."""
        own = [{one.name: sum(one.widths) for one in parts} for parts in self._parts.values()]
        self._sums = SharedSums(own, self._device)

    def kinds(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the second moment of vectors."""
        return () if group["factored"] else (VARIANCE,)

    def first_state(self, group: dict[str, Any], trained: Tensor) -> dict[str, Any]:
        """Adds the count of updates."""
        count = torch.zeros((), dtype=torch.float32, device=trained.device)
        return {"step": count} | super().first_state(group, trained)

    def update(self, group: dict[str, Any], trained: list[Tensor], keep: Tensor) -> None:
        """Updates the weights of a group. Updates take the place of their gradients."""
        parts = [(part, one, self.state[one]) for one in trained for part in self._parts[id(one)]]
        held = [(part, part.of(one), part.of(one.grad), state) for part, one, state in parts]  # type: ignore[arg-type]
        for one in trained:
            self.state[one]["step"] += keep
        sums = self._sums.over_ranks({part.name: part.sums(weight, gradient) for part, weight, gradient, _ in held})
        squares = {}
        for part, weight, gradient, state in held:
            least = group["eps1"] or torch.finfo(weight.dtype).eps
            moved = _count(state).pow(group["beta2_decay"]) * keep
            if part.factors:
                estimate = part.estimate(sums[part.name], moved, least)
            else:
                estimate = part.of(state[VARIANCE]).lerp_(gradient.square(), moved).clone()
            gradient.mul_(estimate.clamp_(min=least**2).rsqrt_())
            squares[part.name] = gradient[part.share].square().sum()[None]
        squares = self._sums.over_ranks(squares, each=1)
        for part, weight, gradient, state in held:
            size, change = ((one[part.name][-1] / part.elements).sqrt() for one in (sums, squares))
            rate = _count(state).rsqrt().clamp(max=group["lr"]) * size.clamp(min=group["eps2"])
            weight.mul_(1 - group["lr"] * group["weight_decay"] * keep)
            weight.addcmul_(gradient, rate / (change / group["d"]).clamp(min=1) * keep, value=-1)


def _count(state: dict[str, Any]) -> Tensor:
    """Returns the number of updates; 1 instead of 0 while a skipped first update changes nothing."""
    count: Tensor = state["step"]
    return count.clamp(min=1)
