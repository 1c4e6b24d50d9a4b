"""What the optimizers of this folder have in common: they can be told on the device to change nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class GuardedOptimizer(Optimizer):
    """An optimizer with the interface of torch's fused kernels.

    If `found_inf` is 1, `step` leaves weights and states unchanged, bit for bit, without waiting for the device: the
    gradient becomes 0, and each factor becomes that of a change by nothing. `grad_scale`, which torch's scaler sets,
    divides the gradient first.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float = 1e-3, *, fused: bool = True, **defaults: Any
    ) -> None:
        super().__init__(list(groups), {"lr": lr, "weight_decay": 0.0, "fused": fused, **defaults})

    @abstractmethod
    def kinds(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the names of the states of a group's weights, tensors that begin as zeros."""

    @abstractmethod
    def update(self, group: dict[str, Any], trained: list[Tensor], keep: Tensor) -> None:
        """Updates weights of a group that have gradients; keep: 1, or 0 to change nothing."""

    def first_state(self, group: dict[str, Any], trained: Tensor) -> dict[str, Any]:
        """Returns the states with which a weight begins."""
        return {kind: torch.zeros_like(trained, memory_format=torch.preserve_format) for kind in self.kinds(group)}

    def factors(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns the states of a whole parameter that do not have its shape, by kind; equal on all its holders."""
        return {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes an update, unless `found_inf` is 1."""
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None]
            if not trained:
                continue
            device = local(trained[0]).device
            # Attributes that are there only while torch's scaler, or the guard, sets them.
            found_inf = getattr(self, "found_inf", torch.zeros(())).to(device)
            scale: Tensor | None = getattr(self, "grad_scale", None)
            for one in trained:
                if not self.state[one]:
                    self.state[one].update(self.first_state(group, one))
                gradient = local(one.grad)
                if scale is not None:
                    gradient.div_(scale.to(device))
                gradient.masked_fill_(found_inf.bool(), 0)
            self.update(group, trained, 1 - found_inf)


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
