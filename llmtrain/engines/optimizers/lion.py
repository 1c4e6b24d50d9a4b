"""Lion (arXiv 2302.06675): every element moves by the learning rate, in the direction of an interpolated momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from llmtrain.engines.optimizers.guarded import GuardedOptimizer
from llmtrain.overrides.torch import local


class Lion(GuardedOptimizer):
    """Lion with decoupled weight decay. Each element is updated by itself, so any shard may be."""

    def kinds(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the momentum."""
        return ("exp_avg",)

    def update(self, group: dict[str, Any], trained: list[Tensor], keep: Tensor) -> None:
        """Moves each element by the sign of a mean of momentum and gradient, then updates the momentum."""
        rate, (direction, decay) = group["lr"] * keep, group["betas"]
        for tensor in trained:
            weight, gradient, momentum = local(tensor), local(tensor.grad), local(self.state[tensor]["exp_avg"])  # type: ignore[arg-type]
            sign = momentum.lerp(gradient, 1 - direction).sign_()
            weight.mul_(1 - rate * group["weight_decay"]).addcmul_(sign, rate, value=-1)
            momentum.lerp_(gradient, (1 - decay) * keep)
