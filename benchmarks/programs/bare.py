"""Training loops as people write them without llmtrain, in plain PyTorch and in plain DeepSpeed.

Both are generators that yield after each step, so that their steps can alternate with those of another loop. They do
not handle checkpoints, signals, watchdogs or non-finite losses. Their batches are tensors in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import get_scheduler

Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs, positions and labels of a micro-batch."""


def groups_of(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns parameter groups in which matrices have weight decay and vectors do not."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def loss_of(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Returns the mean cross-entropy of a micro-batch."""
    inputs, positions, labels = (part.to(device, non_blocking=True) for part in batch)
    logits = model(input_ids=inputs, position_ids=positions, use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)


def deepspeed_steps(
    model: nn.Module, config: dict[str, Any], batches: Iterator[list[Batch]], optim: Any, steps: int, log_every: int
) -> Iterator[None]:
    """Trains with `deepspeed.initialize`, `backward` and `step`."""
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups_of(model, optim.weight_decay),
        config=config,
        lr_scheduler=lambda optimizer: cosine(optimizer, optim, steps),
    )
    for step, micro_batches in enumerate(batches, start=1):
        for batch in micro_batches:
            loss = loss_of(engine, batch, engine.device)
            engine.backward(loss)
            engine.step()
        if step % log_every == 0 and engine.global_rank == 0:
            print(step, loss.item(), flush=True)
        yield


def torch_steps(
    model: nn.Module, batches: Iterator[list[Batch]], optim: Any, steps: int, log_every: int
) -> Iterator[None]:
    """Trains with autograd, `clip_grad_norm_` and fused AdamW; with several ranks, under DistributedDataParallel."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(
        groups_of(model, optim.weight_decay), lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
    )
    scheduler = cosine(optimizer, optim, steps)
    parallel = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    wrapped = nn.parallel.DistributedDataParallel(model) if parallel else model
    for step, micro_batches in enumerate(batches, start=1):
        for index, batch in enumerate(micro_batches, start=1):
            if parallel:
                wrapped.require_backward_grad_sync = index == len(micro_batches)  # type: ignore[assignment]
            loss = loss_of(wrapped, batch, device)
            (loss / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % log_every == 0 and (not parallel or torch.distributed.get_rank() == 0):
            print(step, loss.item(), flush=True)
        yield


def cosine(optimizer: Any, optim: Any, steps: int) -> Any:
    """Returns the recipe's learning rate schedule."""
    return get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=optim.warmup_steps,
        num_training_steps=steps,
        scheduler_specific_kwargs={"min_lr_rate": optim.min_lr_ratio},
    )
