"""Muon (Keller Jordan, 2024; arXiv 2502.16982) for the matrices of decoder layers, and AdamW for everything else.

The update of a matrix is its momentum, made orthogonal: all singular values become about 1. That takes the whole
matrix, so under ZeRO and tensor parallelism ranks gather their shards (`matrices.py`).

DeepSpeed 0.19.8 has a Muon of its own, but it clips, and measures, the orthogonal update in place of the gradient, and
its momentum changes even in steps that are dropped later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmtrain.engines.optimizers.guarded import GuardedOptimizer, update_by_adamw
from llmtrain.engines.optimizers.matrices import LocatedShard, WholeMatrices, located_shards
from llmtrain.engines.state.optimizer_shards import OptimizerShardLists
from llmtrain.engines.state.save_load import Locate
from llmtrain.engines.state.shards import WeightSlice
from llmtrain.overrides.torch import local
from llmtrain.plan.optimizers import is_matrix_of_layer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial that is applied to the singular values: steep at 0, so that a few steps suffice."""
SMALLEST_NORM = 1e-7


class Muon(GuardedOptimizer):
    """Muon for groups with `muon`, AdamW for the others."""

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, **{"muon": False, **defaults})

    def locate_shards(
        self,
        trained: list[Tensor],
        lists: OptimizerShardLists,
        locate: Locate,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Learns where this rank's shards of matrices are; called before the first step.

        trained, lists, locate: as for `located_shards`. dtype, device: those in which matrices are sent and made
        orthogonal.
        """
        self._indices = {id(tensor): index for index, tensor in enumerate(trained)}
        shards = (own_stack(shard) for _, shard in located_shards(trained, lists, locate))
        matrices = [shard for shard in shards if is_matrix_of_layer(shard.name, len(shard.shape))]
        self._matrix_shards = matrices, dtype, device

    def connect(self) -> None:
        """Learns which ranks hold the other shards."""
        self._matrices = WholeMatrices(*self._matrix_shards)

    def kinds(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the momentum of Muon, or the moments of AdamW."""
        return ("momentum_buffer",) if group["muon"] else ("exp_avg", "exp_avg_sq")

    def first_state(self, group: dict[str, Any], trained: Tensor) -> dict[str, Any]:
        """Adds AdamW's count of updates."""
        count = {} if group["muon"] else {"step": torch.zeros((), dtype=torch.float32, device=trained.device)}
        return count | super().first_state(group, trained)

    def update(self, group: dict[str, Any], trained: list[Tensor], keep: Tensor) -> None:
        """Updates the weights of a group."""
        if not group["muon"]:
            update_by_adamw(group, trained, [self.state[tensor] for tensor in trained], keep)
            return
        matrices = self._matrices
        updates: dict[int, Tensor] = {}
        for tensor in trained:
            gradient, momentum = local(tensor.grad), local(self.state[tensor]["momentum_buffer"])  # type: ignore[arg-type]
            momentum.lerp_(gradient, (1 - group["momentum"]) * keep)
            update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()
            updates[self._indices[id(tensor)]] = update.view(-1).to(matrices.device)  # it may be offloaded
        matrices.compute(updates, lambda whole: orthogonal(whole, group["ns_steps"]))
        rate = group["lr"] * keep
        scale = SCALES[group["adjust_lr_fn"]]
        for tensor in trained:
            index, weight = self._indices[id(tensor)], local(tensor)
            for shard, factor in matrices.scales(index, scale):
                updates[index][shard].mul_(factor)
            weight.mul_(1 - rate * group["weight_decay"])
            weight.addcmul_(updates[index].view_as(weight).to(weight.device), rate, value=-1)


def own_stack(shard: LocatedShard) -> LocatedShard:
    """Returns a shard of distributed experts as one of a stack of its own, whose matrices no other rank needs."""
    chunks, is_stack = shard.weight_slice.chunks, len(shard.shape) == 3
    if not is_stack or len(chunks) != 1 or chunks[0].sizes[1:] != shard.shape[1:]:
        return shard
    shape = chunks[0].sizes
    name = f"{shard.name}[{chunks[0].offsets[0]}]"
    return replace(shard, name=name, shape=shape, weight_slice=WeightSlice.whole(shape))


SCALES = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""Factor of the learning rate of a matrix: Keller Jordan's, and Moonlight's, with which updates are as large as AdamW's
usually are."""


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Returns the nearest orthogonal matrix, roughly, by Newton-Schulz iterations in the data type of the matrix.

    matrix: [..., rows, columns]. Singular values come out between about 0.7 and 1.2.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.reshape(-1, *matrix.shape[-2:])
    is_tall = wide.shape[-2] > wide.shape[-1]
    if is_tall:
        wide = wide.mT
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.mT if is_tall else wide).reshape(matrix.shape)
