"""DistributedDataParallel, FSDP2 and DeepSpeed, prepared by Hugging Face Accelerate.

Accelerate keeps its state per process, so a process can have only one such engine at a time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import accelerate
import torch
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DummyOptim,
    DummyScheduler,
    FullyShardedDataParallelPlugin,
)
from deepspeed.runtime.engine import DeepSpeedEngine as Engine
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from llmtrain.data import MicroBatch
from llmtrain.engines.guard import LossAndNorm, reduce_loss_and_norm
from llmtrain.engines.optim import schedule, torch_optimizer
from llmtrain.engines.plain import PlainLoop, plain_model
from llmtrain.engines.state.shards import ReplicaIndex
from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.jobs.accelerate import MIXED_PRECISION
from llmtrain.models.precision import weight_dtype
from llmtrain.models.stages import decoder_layers
from llmtrain.overrides.accelerate import allow_sharding_on_cpus, join_group
from llmtrain.overrides.deepspeed import use_schedule
from llmtrain.plan import Plan
from llmtrain.plan.predict import flat

NAME = f"accelerate {accelerate.__version__}, "
"""Beginning of the description of what accelerate prepares."""


class Accelerated(PlainLoop):
    """DistributedDataParallel or FSDP2: every rank reads different samples, and torch's optimizer takes the step."""

    keeps_masters = False  # FSDP2 computes with bf16 copies of fp32 weights

    def __init__(self, plan: Plan, device: torch.device) -> None:
        """Raises RecipeError if decoder layers share weights under FSDP2."""
        self._plan = plan
        self._weight_dtype = weight_dtype(plan.recipe.parallel.precision)
        self.is_sharded = plan.recipe.parallel.strategy == "fsdp2"
        self.replica = ReplicaIndex.of_rank(None)
        super().__init__(plain_model(plan, device), plan.recipe, plan.optimizer)

    def _distribute(self, optimizer: Optimizer, trained: dict[str, nn.Parameter]) -> Optimizer:
        """Lets accelerate wrap or shard the model. It would advance a schedule once for each process."""
        with _only_plan_decides():
            self._accelerator = (
                _accelerator_sharded(self._plan, self.model, self.device)
                if self.is_sharded
                else _accelerator_ddp(self._plan, self.device)
            )
            self.module, prepared = self._accelerator.prepare(self.model, optimizer)
        inner: Optimizer = prepared.optimizer
        return inner

    def _passes(self, is_last: bool) -> AbstractContextManager[object]:
        """Synchronizes gradients in the passes of the last micro-batch only."""
        context: AbstractContextManager[object] = self._accelerator.no_sync(self.module)
        return nullcontext() if is_last else context

    def _loss_to_reduce(self, loss_sum: Tensor, num_items: int) -> Tensor:
        """Multiplies the loss by the number of ranks, because gradients are averaged over ranks, as in DeepSpeed."""
        return loss_sum * (self.replica.count / num_items)

    def _clip(self, trained: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Clips by the norm of all shards."""
        return _full_tensor(self._accelerator.clip_grad_norm_(self.module.parameters(), limit))

    def _reduce_loss_and_norm(self, loss: Tensor, grad_norm: Tensor) -> LossAndNorm:
        """Reduces the loss and the norm over all ranks."""
        return reduce_loss_and_norm(loss, grad_norm)

    def _all_reduce(self, total: Tensor) -> Tensor:
        """Sums over ranks."""
        self._reshard()
        dist.all_reduce(total)
        return total

    def _next_logits(self, batch: MicroBatch) -> dict[int, Tensor]:
        logits = super()._next_logits(batch)
        self._reshard()
        return logits

    def _reshard(self) -> None:
        """Frees the parameters that FSDP2 gathered in a forward pass and keeps for a backward pass.

        Otherwise a checkpoint would contain them in place of the shards.
        """
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _full_tensor(self, weight: Tensor) -> Tensor:
        """Gathers the shards of a weight."""
        return _full_tensor(weight).to(self._weight_dtype).cpu().clone()

    def describe(self) -> dict[str, Any]:
        """Returns accelerate's version, the class of the module and the backend."""
        return super().describe() | {"engine": f"{NAME}{type(self.module).__name__}", "backend": dist.get_backend()}


def initialise_deepspeed(
    module: nn.Module, groups: list[dict[str, Any]], plan: Plan, ds_config: dict[str, Any], device: torch.device
) -> Engine:
    """Prepares a model, its parameter groups and its schedule with accelerate, in place of `deepspeed.initialize`."""
    optim = plan.recipe.optim.with_warmup_steps(plan.recipe.train.steps)
    with _only_plan_decides():
        accelerator = _accelerator_deepspeed(plan, ds_config, device)
        engine: Engine
        if "optimizer" in ds_config:
            optimizer = DummyOptim(groups, lr=optim.lr, weight_decay=optim.weight_decay)
            scheduler = DummyScheduler(optimizer, lr_scheduler_callable=lambda inner: schedule(inner, plan.recipe))
            engine = accelerator.prepare(module, optimizer, scheduler)[0]
        else:
            own = torch_optimizer(groups, optim, code_dir=plan.recipe.code_dir, tried=plan.optimizer)
            engine = accelerator.prepare(module, own)[0]
            # With an optimizer object, accelerate ignores a schedule for DeepSpeed.
            use_schedule(engine, schedule(engine.basic_optimizer, plan.recipe))
    # Otherwise `transformers` would partition the next model that this process builds.
    unset_hf_deepspeed_config()
    return engine


def _accelerator_ddp(plan: Plan, device: torch.device) -> accelerate.Accelerator:
    join_group(device)
    return _checked(
        accelerate.Accelerator(
            cpu=device.type == "cpu",
            mixed_precision=MIXED_PRECISION[plan.recipe.parallel.precision],
            # Buffers are equal on all ranks, because no step writes to them.
            kwargs_handlers=[
                DistributedDataParallelKwargs(
                    broadcast_buffers=False,
                    bucket_cap_mb=flat.DDP_BUCKET_MIB,
                    gradient_as_bucket_view=True,
                    # An expert may be chosen by no token of a rank.
                    find_unused_parameters=plan.model.experts > 0 or plan.model.expert_modules,
                )
            ],
        )
    )


def _accelerator_sharded(plan: Plan, model: PreTrainedModel, device: torch.device) -> accelerate.Accelerator:
    """Returns an accelerator for FSDP2 over all ranks, with one unit per decoder layer.

    Raises RecipeError if decoder layers share weights.
    """
    layers = decoder_layers(model)[1]
    _check_unshared(layers, plan.model.model_type)
    is_bf16 = plan.recipe.parallel.precision == "bf16"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=plan.parallel.zero_stage == 3,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted({type(layer).__name__ for layer in layers}),
        # Gradients are summed in fp32, both over micro-batches and over ranks.
        mixed_precision_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if is_bf16 else None, reduce_dtype=torch.float32
        ),
        cpu_offload=False,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=False,
    )
    join_group(device)
    allow_sharding_on_cpus(device)
    return _checked(
        accelerate.Accelerator(mixed_precision=MIXED_PRECISION[plan.recipe.parallel.precision], fsdp_plugin=plugin)
    )


def _check_unshared(layers: Iterable[nn.Module], model_type: str) -> None:
    """Raises RecipeError if units share a weight; FSDP2 would fail with a TypeError in its first pass."""
    layers_of = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    if any(number > 1 for number in layers_of.values()):
        message = (
            f"'fsdp2' is not supported for '{model_type}': some of its decoder layers share weights, "
            "but FSDP2 shards each layer separately"
        )
        fix = "--set parallel.accelerate=ddp --set parallel.zero_stage=0"
        raise RecipeError(Problem("accelerate.shared_layers", "parallel.accelerate", message, fix))


def _accelerator_deepspeed(plan: Plan, ds_config: dict[str, Any], device: torch.device) -> accelerate.Accelerator:
    join_group(device)
    return _checked(
        accelerate.Accelerator(
            mixed_precision="no",  # the DeepSpeed configuration sets the precision
            gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config),
        )
    )


def _checked(accelerator: accelerate.Accelerator) -> accelerate.Accelerator:
    """Returns the accelerator. Raises RecipeError if it sees another group: its workers would train separate models."""
    seen, group = (accelerator.process_index, accelerator.num_processes), (dist.get_rank(), dist.get_world_size())
    if seen != group:
        message = f"accelerate reports rank {seen[0]} of {seen[1]}, but the process group rank {group[0]} of {group[1]}"
        raise RecipeError(Problem("launch.alone", "parallel.backend", message, "--set parallel.backend=deepspeed"))
    return accelerator


@contextmanager
def _only_plan_decides() -> Iterator[None]:
    """Hides the variables that `accelerate launch` or a shell has set, and removes those that accelerate sets itself.

    Only the plan decides. A variable that one engine leaves behind, such as ACCELERATE_USE_FSDP, would change the next
    engine of the process.
    """
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(prefixes)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(prefixes)]:
            del os.environ[name]
        os.environ.update(hidden)


def _full_tensor(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
