"""Optimizers, parameter groups and the learning rate schedule, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from llmtrain.engines.optimizers.adafactor import Adafactor
from llmtrain.engines.optimizers.adamw_8bit import AdamW8bit
from llmtrain.engines.optimizers.muon import Muon
from llmtrain.engines.optimizers.own import OwnOptimizer, own_optimizer
from llmtrain.engines.optimizers.schedule_free import ScheduleFreeAdamW
from llmtrain.engines.state.optimizer_shards import OptimizerShardLists, trained_tensors
from llmtrain.engines.state.save_load import Locate, shape_of
from llmtrain.models.adapter import weight_name
from llmtrain.overrides.torch import ShardedSGD
from llmtrain.plan.facts.own_optimizer import TriedOptimizer
from llmtrain.plan.optimizers import is_matrix_of_layer, optimizer_of
from llmtrain.recipe import OptimConfig, Recipe
from llmtrain.recipe.own_code import import_object, is_path


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the groups: matrices, which decay, and biases and norms, which do not; each in the model's order."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if len(shape_of(parameter)) >= 2 else plain).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def groups_for(optim: OptimConfig, models: Iterable[nn.Module], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the groups, divided so that the optimizer updates all weights of a group in the same way.

    models: the model, or the stages of it that this rank has.
    """
    row = optimizer_of(optim)
    if row.moments:
        return [{**group, "quantized": len(shape_of(group["params"][0])) > 1} for group in groups]
    if row.factors:
        return [{**group, "factored": len(shape_of(group["params"][0])) > 1} for group in groups]
    if row.layer_states is None:
        return groups
    named = (item for model in models for item in model.named_parameters())
    matrices = {id(weight) for name, weight in named if is_matrix_of_layer(name, len(shape_of(weight)))}
    divided = []
    for group in groups:
        for by_muon in (True, False):
            if weights := [weight for weight in group["params"] if (id(weight) in matrices) is by_muon]:
                divided.append({**group, "params": weights, "muon": by_muon})
    return divided


def torch_optimizer(
    groups: list[dict[str, Any]],
    optim: OptimConfig,
    is_sharded: bool = False,
    code_dir: str | None = None,
    tried: TriedOptimizer | None = None,
) -> Optimizer:
    """Returns the recipe's optimizer. The guard can skip its updates: it is fused, or the user's own.

    optim: with the warm-up in steps. is_sharded: whether the parameters are, or will be, DTensors. code_dir:
    `Recipe.code_dir`. tried: `Plan.optimizer`.
    """
    if is_path(optim.name):
        return own_optimizer(groups, optim, code_dir, tried)
    row = optimizer_of(optim)
    module, _, name = row.kind.rpartition(".")
    kind: Any = ShardedSGD if is_sharded and name == "SGD" else getattr(import_module(module), name)
    optimizer: Optimizer = kind(groups, lr=optim.lr, fused=True, **row.arguments(optim))
    return optimizer


def locate_shards(
    optimizer: Optimizer,
    outer: Any,
    lists: OptimizerShardLists,
    locate: Locate,
    recipe: Recipe,
    device: torch.device,
) -> None:
    """Tells an optimizer that needs whole matrices, or sums over them, which shards of them this rank holds.

    outer: DeepSpeed's optimizer around it, or itself. lists, locate: as for `matrices.located_shards`.
    """
    if isinstance(optimizer, Muon):
        dtype = torch.float32 if recipe.parallel.precision == "fp32" else torch.bfloat16
        optimizer.locate_shards(trained_tensors(outer), lists, locate, dtype, device)
    elif isinstance(optimizer, Adafactor | AdamW8bit):
        optimizer.locate_shards(trained_tensors(outer), lists, locate, device)


@contextmanager
def averaged_weights(optimizer: Optimizer, outer: Any, changed: Callable[[], object]) -> Iterator[None]:
    """Returns a context in which the model has averaged weights, if the optimizer averages (as schedule-free AdamW).

    outer: DeepSpeed's optimizer around it, or itself. changed: called when the optimizer's weights have changed.
    """
    if isinstance(optimizer, ScheduleFreeAdamW | OwnOptimizer):
        with torch.no_grad(), optimizer.averaged(trained_tensors(outer), changed):
            yield
    else:
        yield


def rate_of(recipe: Recipe, step: int) -> float:
    """Returns the learning rate of a step; the first step is 1."""
    optimizer = torch.optim.SGD([torch.zeros(())], lr=recipe.optim.lr)
    factor: float = schedule(optimizer, recipe).lr_lambdas[0](step - 1)  # type: ignore[attr-defined]
    return recipe.optim.lr * factor


def schedule(optimizer: Optimizer, recipe: Recipe) -> LRScheduler:
    """Returns the recipe's learning rate schedule: a user's own, or one of `transformers`."""
    optim = recipe.optim.with_warmup_steps(recipe.train.steps)
    if is_path(optim.schedule):
        factor = import_object(optim.schedule, recipe.code_dir, "optim.schedule")
        return LambdaLR(optimizer, lambda step: factor(step, recipe))
    names = {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay", "cosine": "cosine_with_min_lr"}
    extras: dict[str, Any] = {}
    if optim.schedule == "cosine":
        extras = {"min_lr_rate": optim.min_lr_ratio}
    elif optim.schedule == "wsd":
        extras = {"num_decay_steps": optim.decay_steps, "min_lr_ratio": optim.min_lr_ratio, "decay_type": "linear"}
    scheduler: LRScheduler = get_scheduler(
        names.get(optim.schedule, optim.schedule),
        optimizer,
        num_warmup_steps=optim.warmup_steps,
        num_training_steps=recipe.train.steps,
        scheduler_specific_kwargs=extras,
    )
    return scheduler


def resume_schedule(schedule: LRScheduler, steps: int) -> None:
    """Sets a schedule to its state after `steps` steps. Its rates are functions of the step."""
    schedule.last_epoch = steps
    lambda_lr: Any = schedule  # as every schedule of ours
    groups = schedule.optimizer.param_groups
    for group, base, factor in zip(groups, lambda_lr.base_lrs, lambda_lr.lr_lambdas, strict=True):
        group["lr"] = base * factor(steps)


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Returns the gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def named_gradients(model: nn.Module, masters: Mapping[nn.Parameter, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the whole gradients of a model by the Hugging Face names of their weights; tied weights once.

    masters: the fp32 copies that are trained instead of weights.
    """
    trained = {weight_name(name): masters.get(weight, weight) for name, weight in model.named_parameters()}
    return {name: weight.grad for name, weight in trained.items() if weight.grad is not None}


def gradient_of(leaf: Tensor) -> Tensor:
    """Returns the gradient of a leaf; zeros if it has none."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
