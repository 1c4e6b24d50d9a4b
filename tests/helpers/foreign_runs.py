"""Runs of other programs on the batches of a tiny recipe: DeepSpeed, the Trainer, and FSDP2 loops.

Each takes some steps, saves in its own way, and goes on. Rows are whole documents of equal length, so a mean over
micro-batches is the mean over all target tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.recipe import Recipe
from tests.helpers.batches import GLOBAL_BATCH, VOCAB, T, part_of, tiny_recipe

SAVED = 5
NEXT = 20
FIELDS: dict[str, Any] = {"optim.weight_decay": 0.1, "train.max_steps": 40}


def foreign_recipe(**fields: Any) -> Recipe:
    """Returns the recipe of the runs."""
    return tiny_recipe(**FIELDS, **fields)


def rows(step: int) -> Tensor:
    """Returns the tokens of a step: one more than a row is long."""
    generator = torch.Generator().manual_seed(500 + step)
    shape = (GLOBAL_BATCH, T + 1)
    return torch.randint(0, VOCAB, shape, generator=generator) * torch.randint(0, VOCAB, shape, generator=generator) // VOCAB


def batch_of(step: int, micro: int, accumulation: int, rank: int, ranks: int) -> StepBatch:
    """Returns a rank's part of a step, for an engine here."""
    positions = torch.arange(T)[None]
    samples = [
        MicroBatch(input_ids=row[None, :-1], position_ids=positions, labels=row[None, 1:]) for row in rows(step)
    ]
    return part_of(samples, step, micro, accumulation, rank, ranks)


def parts(step: int, rank: int, ranks: int, micro: int = 2) -> list[Tensor]:
    """Returns a rank's micro-batches of a step, for a loop elsewhere."""
    return list(rows(step)[rank::ranks].split(micro))


def model_of(recipe: Recipe) -> nn.Module:
    """Returns the recipe's model of transformers, with weights that all programs begin with."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(recipe.model.architecture, **recipe.model.config)
    return AutoModelForCausalLM.from_config(config)


def loss_of(model: nn.Module, part: Tensor) -> Tensor:
    """Returns the mean loss of some rows."""
    return loss_of_logits(model(input_ids=part[:, :-1], use_cache=False).logits, part[:, 1:])


def loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def groups_of(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2 and weight.requires_grad]
    others = [weight for weight in model.parameters() if weight.ndim < 2 and weight.requires_grad]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def schedule_of(optimizer: torch.optim.Optimizer, recipe: Recipe) -> Any:
    from transformers import get_scheduler

    optim = recipe.optim
    return get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=optim.warmup_steps,
        num_training_steps=recipe.train.max_steps,
        scheduler_specific_kwargs={"min_lr_rate": optim.min_lr_ratio},
    )


def adamw_of(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    optim = recipe.optim
    return torch.optim.AdamW(groups_of(model, optim.weight_decay), lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps)


def _averaged(losses: list[float]) -> float:
    from torch import distributed as dist

    total = torch.tensor(losses, dtype=torch.float64).mean()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total)


def deepspeed_run(rank: int, folder: Path, stage: int, ranks: int, fields: dict[str, Any] | None = None) -> list[float]:
    """Trains with DeepSpeed; returns the losses after the save. `freeze` in fields: freezes the first norm."""
    import deepspeed

    recipe = foreign_recipe()
    model = model_of(recipe)
    for name, weight in model.named_parameters():
        if fields and name in fields.get("frozen", ()):
            weight.requires_grad_(False)
    optimizer = adamw_of(model, recipe)
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": recipe.optim.clip_grad_norm,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, "sub_group_size": 20_000},
        "zero_allow_untested_optimizer": True,
    }
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=lambda inner: schedule_of(inner, recipe), config=config
    )
    losses = []
    for step in range(SAVED + NEXT):
        if step == SAVED:
            engine.save_checkpoint(str(folder))
        seen = []
        for part in parts(step, rank, ranks):
            loss = loss_of(engine, part)
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
        losses.append(_averaged(seen))
    return losses[SAVED:]
