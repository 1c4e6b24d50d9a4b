"""Parameter groups and the learning rate schedule, the same for every engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from llmtrain.recipe import OptimConfig, Recipe


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices, which decay, and biases and norms, which do not; each in the model's own order."""
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


def torch_optimizer(groups: list[dict[str, Any]], optim: OptimConfig) -> Optimizer:
    """The recipe's optimizer as plain PyTorch builds it; fused, so that `llmtrain.engines.guard` can skip an update."""
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.betas[0], fused=True)
    kind = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def schedule(optimizer: Optimizer, recipe: Recipe) -> LRScheduler:
    """The recipe's learning rate schedule, from `transformers`."""
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
