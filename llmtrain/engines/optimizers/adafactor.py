"""Adafactor (arXiv 1804.04235), as in torch: the second moment of a matrix is a product of its rows' and columns'.

An update takes two rounds of sums over the whole matrix: of squared gradients, along rows and columns, and then of the
squared update, by which it is clipped. Under ZeRO and tensor parallelism ranks hold shards of matrices, so they
exchange these sums (`sums.py`), which are vectors; no rank needs a whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.engines.optimizers.guarded import Factor, GuardedOptimizer
from llmtrain.engines.optimizers.matrices import LocatedShard, located_shards
from llmtrain.engines.optimizers.sums import SharedSums
from llmtrain.engines.state.optimizer_shards import OptimizerShardLists
from llmtrain.engines.state.save_load import Locate
from llmtrain.engines.state.shards import WeightSlice
from llmtrain.overrides.torch import local
from llmtrain.system.piece_headers import WEIGHT

ROWS, COLUMNS, VARIANCE = "row_var", "col_var", "variance"
"""Torch's names of the states: for a matrix, the mean squared gradient of each row and each column; for a vector, that
of each element."""


class MatrixRange:
    """A flat range of a slice of a matrix, or of a stack of matrices, as the rows that contain it.

    Elements before and after the range, in its first and last row, are 0. If the range spans several matrices of a
    stack, the rows are those of whole matrices.
    """

    def __init__(self, shard: LocatedShard, first: int, end: int) -> None:
        """first, end: the range within the shard."""
        weight_slice, first, end = shard.weight_slice, shard.start + first, shard.start + end
        last = len(weight_slice.shape) - 1
        is_stack = len(shard.shape) > 2
        self._rows = weight_slice.project(range(last))
        self._columns = weight_slice.project((0, last) if is_stack else (last,))
        matrices = weight_slice.project((0,)).numel if is_stack else 1
        height, width = self._rows.numel // matrices, self._columns.numel // matrices
        above, below = first // width, -(-end // width)
        number = (below - 1) // height - above // height + 1
        if number > 1:
            above, below = above // height * height, -(-below // height) * height
        self._matrices = slice(above // height, above // height + number)
        self._row_range = slice(above, below)
        self._size = number, (below - above) // number, width
        self._range = slice(first - above * width, end - above * width)

    def add_sums(self, squares: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Adds the sums of flat elements to those of the rows and columns of the whole weight."""
        padded = squares.new_zeros(self._size)
        padded.view(-1)[self._range] = squares
        sums = self._rows.take(rows)
        sums[self._row_range] += padded.sum(-1).view(-1)
        self._rows.put(sums, rows)
        sums = self._columns.take(columns)
        sums.view(-1, self._size[-1])[self._matrices] += padded.sum(-2)
        self._columns.put(sums, columns)

    def product(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns the products of the rows' and the columns' values of the whole weight, flat, one for each element."""
        of_rows = self._rows.take(rows)[self._row_range].view(*self._size[:2], 1)
        of_columns = self._columns.take(columns).view(-1, 1, self._size[-1])[self._matrices]
        return (of_rows * of_columns).view(-1)[self._range]


class FactoredShard:
    """A rank's shard of a weight, and the factors of the whole weight if it is a matrix."""

    def __init__(self, shard: LocatedShard, like: Tensor) -> None:
        """like: has the type and device of the factors."""
        self.name, self.elements = shard.name, math.prod(shard.shape)
        self._shape, self._range = shard.shape, slice(shard.offset, shard.offset + shard.length)
        first, end = shard.sent_range()
        self.summed = slice(first, end)
        """The elements over which this replica sums."""
        self.factors: dict[str, Tensor] = {}
        if len(shard.shape) > 1:
            *matrices, rows, columns = shard.shape
            self.factors = {ROWS: like.new_zeros(*matrices, rows), COLUMNS: like.new_zeros(*matrices, columns)}
            self._matrix_range = MatrixRange(shard, 0, shard.length)
            self._summed_range = MatrixRange(shard, first, end) if end > first else None
        self.widths = [*(factor.numel() for factor in self.factors.values()), 1]
        """Numbers of sums over the whole weight: of squared gradients by row, by column, and of the squared weight."""

    def of(self, trained: Tensor) -> Tensor:
        """Returns this shard of a trained tensor, or of its gradient, flat."""
        return local(trained).view(-1)[self._range]

    def sums(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Returns what this replica adds to the sums over the whole weight."""
        sums = weight.new_zeros(sum(self.widths))
        sums[-1] = weight[self.summed].square().sum()
        if self.factors and self._summed_range is not None:
            rows, columns, _ = torch.split(sums, self.widths)
            self._summed_range.add_sums(gradient[self.summed].square(), rows, columns)
        return sums

    def estimate(self, sums: Tensor, moved: Tensor, least: float) -> Tensor:
        """Moves the factors by a fraction `moved` towards means of squared gradients; returns the second moment.

        The second moment is that of this shard. sums: over the whole matrix. least: lower bound of the divisor, the
        mean of the rows' factors.
        """
        rows, columns = self.factors.values()
        of_rows, of_columns, _ = torch.split(sums, self.widths)
        rows.lerp_(of_rows.view_as(rows) / self._shape[-1], moved)
        columns.lerp_(of_columns.view_as(columns) / self._shape[-2], moved)
        return self._matrix_range.product(rows / rows.mean(-1, keepdim=True).clamp(min=least), columns)


class Adafactor(GuardedOptimizer):
    """Adafactor for groups of matrices, which have `factored`, and for groups of vectors."""

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, **{"factored": False, **defaults})
        self._of_parameter: dict[nn.Parameter, FactoredShard] = {}

    def locate_shards(
        self, trained: list[Tensor], lists: OptimizerShardLists, locate: Locate, device: torch.device
    ) -> None:
        """Learns which shards of weights this rank holds, and makes their factors; called before the first step.

        trained, lists, locate: as for `located_shards`. device: where sums are exchanged.
        """
        self._device = device
        self._shards: dict[int, list[FactoredShard]] = {id(tensor): [] for tensor in trained}
        for optimizer_shard, located in located_shards(trained, lists, locate):
            if located.length:
                shard = FactoredShard(located, optimizer_shard.tensors[WEIGHT])
                self._shards[id(optimizer_shard.trained)].append(shard)
                self._of_parameter[optimizer_shard.parameter] = shard

    def factors(self, parameter: nn.Parameter) -> dict[str, Factor]:
        """Returns the factors of a matrix."""
        shard = self._of_parameter.get(parameter)
        factors = shard.factors if shard else {}
        return {kind: Factor(WeightSlice.whole(values.shape), 0, values.view(-1)) for kind, values in factors.items()}

    def connect(self) -> None:
        """Learns which ranks hold shards of the same weights."""
        counts = [{shard.name: sum(shard.widths) for shard in shards} for shards in self._shards.values()]
        self._sums = SharedSums(counts, self._device)

    def kinds(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the second moment of vectors."""
        return () if group["factored"] else (VARIANCE,)

    def first_state(self, group: dict[str, Any], trained: Tensor) -> dict[str, Any]:
        """Adds the count of updates."""
        count = torch.zeros((), dtype=torch.float32, device=trained.device)
        return {"step": count} | super().first_state(group, trained)

    def update(self, group: dict[str, Any], trained: list[Tensor], keep: Tensor) -> None:
        """Updates the weights of a group. Updates take the place of their gradients."""
        pairs = [(shard, tensor) for tensor in trained for shard in self._shards[id(tensor)]]
        parts = [
            (shard, shard.of(tensor), shard.of(tensor.grad), self.state[tensor])  # type: ignore[arg-type]
            for shard, tensor in pairs
        ]
        for tensor in trained:
            self.state[tensor]["step"] += keep
        sums = self._sums.reduce({shard.name: shard.sums(weight, gradient) for shard, weight, gradient, _ in parts})
        squares = {}
        for shard, weight, gradient, state in parts:
            least = group["eps1"] or torch.finfo(weight.dtype).eps
            moved = _count(state).pow(group["beta2_decay"]) * keep
            if shard.factors:
                estimate = shard.estimate(sums[shard.name], moved, least)
            else:
                estimate = shard.of(state[VARIANCE]).lerp_(gradient.square(), moved).clone()
            gradient.mul_(estimate.clamp_(min=least**2).rsqrt_())
            squares[shard.name] = gradient[shard.summed].square().sum()[None]
        squares = self._sums.reduce(squares, count=1)
        for shard, weight, gradient, state in parts:
            size, change = ((total[shard.name][-1] / shard.elements).sqrt() for total in (sums, squares))
            rate = _count(state).rsqrt().clamp(max=group["lr"]) * size.clamp(min=group["eps2"])
            weight.mul_(1 - group["lr"] * group["weight_decay"] * keep)
            weight.addcmul_(gradient, rate / (change / group["d"]).clamp(min=1) * keep, value=-1)


def _count(state: dict[str, Any]) -> Tensor:
    """Returns the number of updates; 1 instead of 0 while a skipped first update changes nothing."""
    count: Tensor = state["step"]
    return count.clamp(min=1)
