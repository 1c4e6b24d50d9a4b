"""What the optimizers of this folder have in common: an update can be skipped on the device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from llmtrain.engines.state.shards import WeightSlice
from llmtrain.overrides.torch import local


class Factor(NamedTuple):
    """A state whose shape differs from the parameter's, or this rank's shard of it."""

    weight_slice: WeightSlice
    """Its place in the whole state."""
    start: int
    """Index of the first value within the flat slice."""
    values: Tensor
    """Flat."""


class GuardedOptimizer(Optimizer):
    """An optimizer with the interface of torch's fused kernels.

    If `found_inf` is 1, `step` leaves weights and states unchanged, bit for bit, without waiting for the device: the
    gradient becomes 0, and `update` gets `keep` = 0. `grad_scale`, which torch's scaler sets, divides the gradient
    first.
    """

    _step_supports_amp_scaling = True
    _is_connected = False

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

    def factors(self, parameter: nn.Parameter) -> dict[str, Factor]:
        """Returns the states of a parameter that do not have its shape, by kind; equal on all ranks that have them."""
        return {}

    def connect(self) -> None:
        """Prepares exchanges with other ranks. All ranks call it, in their first step.

        Not earlier: a rank that converts a checkpoint has no other ranks to ask.
        """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes an update, unless `found_inf` is 1. All ranks call it, even those that hold nothing."""
        if not self._is_connected:
            self.connect()
            self._is_connected = True
        for group in self.param_groups:
            trained = [tensor for tensor in group["params"] if tensor.grad is not None]
            if not trained:
                continue
            device = local(trained[0]).device
            # These attributes exist only if torch's scaler or the guard has set them.
            found_inf = getattr(self, "found_inf", torch.zeros(())).to(device)
            scale: Tensor | None = getattr(self, "grad_scale", None)
            for tensor in trained:
                if not self.state[tensor]:
                    self.state[tensor].update(self.first_state(group, tensor))
                gradient = local(tensor.grad)
                if scale is not None:
                    gradient.div_(scale.to(device))
                gradient.masked_fill_(found_inf.bool(), 0)
            self.update(group, trained, 1 - found_inf)


def update_by_adamw(group: dict[str, Any], trained: list[Tensor], states: list[dict[str, Any]], keep: Tensor) -> None:
    """Updates weights by torch's AdamW; keep: 1, or 0 to change nothing."""
    adamw(
        [local(tensor) for tensor in trained],
        [local(tensor.grad) for tensor in trained],  # type: ignore[arg-type]
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        [],
        [local(state["step"]) for state in states],
        fused=True,
        found_inf=1 - keep,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
