"""Schedule-free AdamW (arXiv 2405.15682): an average of all updates takes the place of a decaying learning rate.

There are three points: gradients are taken at y, which the model holds while it trains; z moves by the updates; x is a
running mean of z, and the result of the run: evaluations and exports read it. Only y and z are kept, since y is
(1 − β₁)·z + β₁·x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from llmtrain.engines.optimizers.guarded import GuardedOptimizer
from llmtrain.overrides.torch import local
from llmtrain.plan.optimizers import POINT


class ScheduleFreeAdamW(GuardedOptimizer):
    """Schedule-free AdamW with decoupled weight decay at y. Each element is updated by itself, so any shard may be.

    An update counts in the mean by the square of its share of the warm-up, as in the paper with a learning rate that
    rises linearly and stays. This is a function of the number of updates, so nothing else has to be saved.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float = 1e-3, *, warmup: int = 0, **defaults: Any) -> None:
        super().__init__(groups, lr, **defaults)
        self._warmup = warmup
        self._is_averaged = False

    def kinds(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns z, and the second moment."""
        return (POINT, "exp_avg_sq")

    def first_state(self, group: dict[str, Any], trained: Tensor) -> dict[str, Any]:
        """Begins with z where y is, and counts updates."""
        step = torch.zeros((), dtype=torch.float32, device=trained.device)
        moment = torch.zeros_like(trained, memory_format=torch.preserve_format)
        return {"step": step, POINT: trained.detach().clone(), "exp_avg_sq": moment}

    def update(self, group: dict[str, Any], trained: list[Tensor], keep: Tensor) -> None:
        """Moves z by the update, and y towards z and by its part of the update."""
        beta, decay = group["betas"]
        rate = group["lr"] * keep
        for tensor in trained:
            state = self.state[tensor]
            y, gradient = local(tensor), local(tensor.grad)  # type: ignore[arg-type]
            z, moment, step = (local(state[kind]) for kind in (POINT, "exp_avg_sq", "step"))
            share = _share_of_mean(step, self._warmup)
            step += keep
            moment.lerp_(gradient.square(), (1 - decay) * keep)
            # `step` is 0 only if no update has been applied; then `keep` and the moment are 0, too.
            size = (moment / (1 - decay ** step.clamp(min=1))).sqrt_().add_(group["eps"])
            update = gradient.div(size).add_(y, alpha=group["weight_decay"])
            y.lerp_(z, share * keep)
            y.addcmul_(update, rate * (beta * (1 - share) - 1))
            z.addcmul_(update, rate, value=-1)

    @contextmanager
    def averaged(self, trained: list[Tensor], changed: Callable[[], object]) -> Iterator[None]:
        """Replaces y by x within the context, and restores y afterwards.

        trained: all that this optimizer trains on this rank. changed: called after each of the two, by all ranks.
        """
        if self._is_averaged:
            yield
            return
        beta = self.param_groups[0]["betas"][0]
        points = [
            (local(tensor), local(tensor).clone(), local(self.state[tensor][POINT]))
            for tensor in trained
            if self.state[tensor]
        ]
        for weight, y, z in points:
            weight.copy_(mean_of(y, z, beta))
        changed()
        self._is_averaged = True
        try:
            yield
        finally:
            self._is_averaged = False
            for weight, y, _ in points:
                weight.copy_(y)
            changed()


def mean_of(y: Tensor, z: Tensor, beta: float) -> Tensor:
    """Returns x, the running mean, from y and z."""
    return (y - (1 - beta) * z) / beta


def _share_of_mean(updates: Tensor, warmup: int) -> Tensor:
    """Returns the weight of the next update in the mean, relative to the sum of all weights so far and its own.

    updates: how many there were. The weight of update k is 1, or (k / warmup)² during the warm-up.
    """
    if not warmup:
        return (updates + 1).reciprocal()
    rising = updates.clamp(max=warmup - 1)
    total = rising * (rising + 1) * (2 * rising + 1) / (6 * warmup**2) + (updates - warmup + 1).clamp(min=0)
    return (updates / warmup).clamp(max=1).square() / total.clamp(min=torch.finfo(torch.float32).tiny)
