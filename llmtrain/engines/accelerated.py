"""DistributedDataParallel, FSDP2 and DeepSpeed, prepared and stepped by Hugging Face Accelerate.

Accelerate keeps its state per process, so a process can have only one such engine at a time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
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
from deepspeed.runtime.engine import DeepSpeedEngine as _Engine
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines.deepspeed.engine import DeepSpeedEngine
from llmtrain.engines.engine import StepResult
from llmtrain.engines.forward import forward, install_kernels
from llmtrain.engines.guard import Guard, Measured, over_ranks
from llmtrain.engines.optim import parameter_groups, schedule, torch_optimizer
from llmtrain.engines.state.held import held
from llmtrain.engines.state.pieces import Piece, Region
from llmtrain.engines.state.save_load import (
    Place,
    load_state,
    pieces_of,
    save_state,
    untrained_pieces,
)
from llmtrain.engines.state.writer import Writer
from llmtrain.engines.step import finish, take_step
from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.jobs.accelerate import MIXED_PRECISION
from llmtrain.models import build_model
from llmtrain.models.precision import weight_dtype
from llmtrain.models.stages import decoder_layers
from llmtrain.overrides.accelerate import allow_sharding_on_cpus, join_group
from llmtrain.overrides.torch import resume_schedule
from llmtrain.plan import Plan


class AcceleratedDataParallel:
    """DistributedDataParallel or FSDP2: every rank reads different samples, and torch's optimizer takes the step."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        recipe = plan.recipe
        self.weight_dtype = weight_dtype(recipe.parallel.precision)
        self.is_sharded = recipe.parallel.strategy == "fsdp2"
        model = build_model(recipe, self.weight_dtype, device)
        if recipe.parallel.activation_checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        install_kernels(model, plan)
        self.model = model
        groups = parameter_groups(model, recipe.optim.weight_decay)
        optimizer = torch_optimizer(groups, recipe.optim, self.is_sharded)
        with _undisturbed():
            self.accelerator = (
                _accelerator_sharded(plan, model, device) if self.is_sharded else _accelerator_ddp(plan, device)
            )
            self.engine, prepared = self.accelerator.prepare(model, optimizer)
        self.optimizer = prepared.optimizer
        self.guard = Guard(recipe.guard, device)
        self.guard.watch(self.optimizer)
        # Not prepared, because accelerate would step it once for each process.
        self.scheduler = schedule(self.optimizer, recipe)

    @property
    def data_parallel_rank(self) -> int:
        """Rank of this process; every rank is a replica."""
        return dist.get_rank()

    def train_step(self, batch: StepBatch) -> StepResult:
        """Accumulates this rank's micro-batches, averages gradients over ranks with the last one, and updates once."""
        return take_step(self, batch)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        rate: float = self.optimizer.param_groups[0]["lr"]
        return rate

    def start(self) -> None:
        """Puts the model in training mode."""
        if not self.model.training:
            self.engine.train()

    def passing(self, is_last: bool) -> AbstractContextManager[object]:
        """Returns the context of a micro-batch's passes; only the last micro-batch synchronizes gradients."""
        context: AbstractContextManager[object] = self.accelerator.no_sync(self.engine)
        return nullcontext() if is_last else context

    def forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Returns this rank's sum of cross-entropies, and the auxiliary loss of a mixture of experts."""
        with self._autocast():
            return forward(self.engine, self.model, micro_batch, self.device)

    def weigh(self, loss_sum: Tensor, target_tokens: int) -> Tensor:
        """Scales a rank's loss by the number of ranks, because gradients are averaged over ranks, as in DeepSpeed."""
        return loss_sum * (self.plan.data_parallel_size / target_tokens)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Accumulates the gradients of a micro-batch."""
        self.accelerator.backward(loss)

    def finish(self, loss: Tensor) -> Measured:
        """Takes the norm and the verdict, and updates the weights."""
        return finish(self, loss)

    def clip(self) -> Tensor:
        """Clips the gradients; returns their norm before clipping."""
        limit = self.plan.recipe.optim.clip_grad_norm or float("inf")
        return _whole(self.accelerator.clip_grad_norm_(self.engine.parameters(), limit))

    def measure(self, loss: Tensor, grad_norm: Tensor) -> Measured:
        """Combines the loss and the norm of all ranks; `loss` is this rank's share."""
        return over_ranks(loss, grad_norm)

    def update(self) -> None:
        """Steps the optimizer and the schedule, and clears the gradients."""
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def eval_step(self, batch: StepBatch) -> Tensor:
        """Returns the mean cross-entropy over the target tokens of all ranks."""
        self.engine.eval()
        total = torch.zeros((), device=self.device)
        for micro_batch in batch.micro_batches:
            total += self.forward(micro_batch)[0]
        self._reshard()
        dist.all_reduce(total)
        return total / batch.target_tokens

    def save(self, writer: Writer) -> None:
        """Writes this rank's share of the pieces."""
        save_state(self, writer)

    def load(self, folder: Path) -> None:
        """Loads a checkpoint, which any engine may have written."""
        load_state(self, folder)

    def pieces(self) -> Iterator[list[Piece]]:
        """Yields live pieces of all trained tensors, then of the untrained ones."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        everywhere = (dist.get_rank(), dist.get_world_size())
        copy = (0, 1) if self.is_sharded else everywhere  # FSDP2's shards are not copies of each other

        def place(parameter: nn.Parameter) -> Place:
            return names[parameter], Region.whole(parameter.shape), copy

        yield from pieces_of(held(self.optimizer), place)
        yield untrained_pieces(self.model, everywhere)

    def progress(self) -> dict[str, Any]:
        """Returns the position of the schedule."""
        return {"schedule": self.scheduler.last_epoch}

    def resumed(self, progress: dict[str, Any]) -> None:
        """Restores the schedule after the pieces have been loaded."""
        resume_schedule(self.scheduler, progress["schedule"])

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every whole weight by its Hugging Face name, in the dtype of the forward pass; tied weights once."""
        for name, parameter in self.model.named_parameters():
            yield name, _whole(parameter.detach()).to(self.weight_dtype).cpu().clone()

    def describe(self) -> dict[str, Any]:
        """Returns the versions and classes in use, the device and the backend."""
        return {
            "engine": f"accelerate {accelerate.__version__}, {type(self.engine).__name__}",
            "optimizer": type(self.optimizer).__name__,
            "device": str(self.device),
            "backend": dist.get_backend(),
        }

    def _reshard(self) -> None:
        """Frees the parameters that FSDP2 gathered in a forward pass and keeps for a backward pass.

        Otherwise a checkpoint would contain them in place of the shards.
        """
        for module in self.engine.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _autocast(self) -> AbstractContextManager[object]:
        is_on = self.plan.recipe.parallel.precision == "autocast_bf16"
        context: AbstractContextManager[object] = self.accelerator.autocast() if is_on else nullcontext()
        return context


class AcceleratedDeepSpeed(DeepSpeedEngine):
    """DeepSpeed with the same configuration and files, initialized and stepped by Accelerate."""

    def _initialise(self, ds_config: dict[str, Any]) -> _Engine:
        recipe = self.plan.recipe
        optim = recipe.optim
        with _undisturbed():
            self.accelerator = _accelerator_deepspeed(self.plan, ds_config, self.device)
            groups = parameter_groups(self.model, optim.weight_decay)
            optimizer = DummyOptim(groups, lr=optim.lr, weight_decay=optim.weight_decay)
            scheduler = DummyScheduler(optimizer, lr_scheduler_callable=lambda inner: schedule(inner, recipe))
            engine: _Engine = self.accelerator.prepare(self.model, optimizer, scheduler)[0]
        # Otherwise `transformers` would partition the next model that this process builds.
        unset_hf_deepspeed_config()
        # `accelerator.backward` calls `engine.step` after the last micro-batch, before the norm is taken.
        self._own_step, engine.step = engine.step, lambda: None
        return engine

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Accumulates the gradients of a micro-batch."""
        self.accelerator.sync_gradients = is_last
        self.accelerator.backward(loss, scale_wrt_gas=False)

    def _step(self) -> None:
        self._own_step()

    def describe(self) -> dict[str, Any]:
        """Adds accelerate's version to DeepSpeed's description."""
        described = super().describe()
        return {**described, "engine": f"accelerate {accelerate.__version__}, {described['engine']}"}


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
    holders = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    if any(number > 1 for number in holders.values()):
        message = f"'fsdp2' was given, but decoder layers of '{model_type}' share weights, and each is sharded alone"
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
        message = (
            f"accelerate sees itself as process {seen[0]} of {seen[1]}, the group has it as {group[0]} of {group[1]}"
        )
        raise RecipeError(Problem("launch.alone", "parallel.backend", message, "--set parallel.backend=deepspeed"))
    return accelerator


@contextmanager
def _undisturbed() -> Iterator[None]:
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


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
