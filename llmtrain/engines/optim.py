"""Optimizers, parameter groups, the learning rate schedule and the norm of gradients, the same for every engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from llmtrain.plan.optimizers import optimizer_of
from llmtrain.recipe import OptimConfig, Recipe


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the groups: matrices, which decay, and biases and norms, which do not; each in the model's order."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            # A parameter that ZeRO-3 has partitioned is flat; its true shape is `ds_shape`.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            (decayed if len(shape) >= 2 else plain).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def torch_optimizer(groups: list[dict[str, Any]], optim: OptimConfig, is_sharded: bool = False) -> Optimizer:
    """Returns the recipe's optimizer as plain PyTorch builds it; fused, so that the guard can skip an update.

    is_sharded: whether the parameters are, or will be, DTensors.
    """
    row = optimizer_of(optim)
    kind: Any = ShardedSGD if is_sharded and row.torch == "SGD" else getattr(torch.optim, row.torch)
    optimizer: Optimizer = kind(groups, lr=optim.lr, fused=True, **row.arguments(optim))
    return optimizer


class ShardedSGD(torch.optim.SGD):
    """SGD on this rank's shards: torch 2.13 supports DTensors in the fused kernel of Adam, but not in that of SGD."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates each shard unless `found_inf` is 1. The momentum buffers must exist (`llmtrain.engines.guard`)."""
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None and _local(one).numel()]
            if not trained:
                continue
            torch._fused_sgd_(
                [_local(one) for one in trained],
                [_local(one.grad) for one in trained],
                [_local(self.state[one]["momentum_buffer"]) for one in trained] if group["momentum"] else [],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                is_first_step=False,
                found_inf=self.found_inf,  # type: ignore[attr-defined]
            )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rate_of(recipe: Recipe, step: int) -> float:
    """Returns the learning rate of a step; the first step is 1."""
    optimizer = torch.optim.SGD([torch.zeros(())], lr=recipe.optim.lr)
    factor: float = schedule(optimizer, recipe).lr_lambdas[0](step - 1)  # type: ignore[attr-defined]
    return recipe.optim.lr * factor


def schedule(optimizer: Optimizer, recipe: Recipe) -> LRScheduler:
    """Returns the recipe's learning rate schedule, from `transformers`."""
    optim = recipe.optim
    names = {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay", "cosine": "cosine_with_min_lr"}
    extras: dict[str, Any] = {}
    if optim.schedule == "cosine":
        extras = {"min_lr_rate": optim.min_lr_ratio}
    elif optim.schedule == "wsd":
        extras = {"num_decay_steps": optim.decay_steps, "min_lr_ratio": optim.min_lr_ratio, "decay_type": "linear"}
    made: LRScheduler = get_scheduler(
        names.get(optim.schedule, optim.schedule),
        optimizer,
        num_warmup_steps=optim.warmup_steps,
        num_training_steps=recipe.train.max_steps,
        scheduler_specific_kwargs=extras,
    )
    return made


PIECE = 2**16
"""Number of elements that are summed in fp32 on a CPU. There, torch's norm of 50 million elements is off by 3e-3, as
are `clip_grad_norm_` and `get_total_norm`; the norm computed in pieces is off by 2e-7, in an eighth of the time that
fp64 takes."""


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of the squares of all elements of all `gradients`, an fp64 scalar on `device`; 0 without any."""
    pieces = [piece for one in gradients for piece in _pieces(one.detach())]
    norms = torch._foreach_norm(pieces, 2, dtype=torch.float32) if pieces else ()
    nothing = torch.zeros((), device=device)
    return torch.stack([nothing, *(norm.to(device) for norm in norms)]).double().square().sum()


def _pieces(gradient: Tensor) -> Sequence[Tensor]:
    """Splits a gradient into pieces for which fp32 suffices. A GPU's kernel does so itself (ForeachReduceOp.cu)."""
    return torch.split(gradient.reshape(-1), PIECE) if gradient.device.type == "cpu" else (gradient,)


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Returns the gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
