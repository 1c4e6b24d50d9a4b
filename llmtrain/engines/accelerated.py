"""DistributedDataParallel, FSDP2 and DeepSpeed, prepared and stepped by Hugging Face Accelerate.

Accelerate keeps its state per process, so there is one such engine at a time.
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
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
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
from llmtrain.engines.deepspeed import DeepSpeedEngine
from llmtrain.engines.forward import forward, install_kernels
from llmtrain.engines.guard import Guard, Measured, over_ranks
from llmtrain.engines.held import held
from llmtrain.engines.optim import parameter_groups, schedule, torch_optimizer
from llmtrain.engines.pieces import Piece, Region
from llmtrain.engines.seam import StepResult
from llmtrain.engines.state import Place, load_state, pieces_of, resume_schedule, save_state, untrained_pieces
from llmtrain.engines.step import finish, take_step
from llmtrain.engines.writer import Writer
from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.accelerate import MIXED_PRECISION
from llmtrain.models import build_model
from llmtrain.models.precision import weight_dtype
from llmtrain.models.stages import decoder_layers
from llmtrain.plan import Plan


class AcceleratedDataParallel:
    """DistributedDataParallel, or FSDP2: every rank sees other samples, and torch's own optimizer takes the step."""

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
        # Not prepared: accelerate would step it once for each process.
        self.scheduler = schedule(self.optimizer, recipe)

    @property
    def data_parallel_rank(self) -> int:
        """Every rank is a replica."""
        return dist.get_rank()

    def train_step(self, batch: StepBatch) -> StepResult:
        """Accumulates this rank's micro-batches, averages gradients over ranks with the last one, and updates once."""
        return take_step(self, batch)

    @property
    def learning_rate(self) -> float:
        """Of the step to come."""
        rate: float = self.optimizer.param_groups[0]["lr"]
        return rate

    def start(self) -> None:
        """Sets the training mode."""
        if not self.model.training:
            self.engine.train()

    def passing(self, is_last: bool) -> AbstractContextManager[object]:
        """Of a micro-batch; gradients travel with the last one."""
        context: AbstractContextManager[object] = self.accelerator.no_sync(self.engine)
        return nullcontext() if is_last else context

    def forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """This rank's sum of cross-entropies, and the auxiliary loss of a mixture of experts."""
        with self._autocast():
            return forward(self.engine, self.model, micro_batch, self.device)

    def weigh(self, loss_sum: Tensor, target_tokens: int) -> Tensor:
        """Gradients are averaged over ranks, so a rank's loss is multiplied by their number, as under DeepSpeed."""
        return loss_sum * (self.plan.layout.dp / target_tokens)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds the gradients of a micro-batch."""
        self.accelerator.backward(loss)

    def finish(self, loss: Tensor) -> Measured:
        """Norm, verdict and update."""
        return finish(self, loss)

    def clip(self) -> Tensor:
        """Clips the gradients; returns their norm before."""
        limit = self.plan.recipe.optim.clip_grad_norm or float("inf")
        return _whole(self.accelerator.clip_grad_norm_(self.engine.parameters(), limit))

    def measure(self, loss: Tensor, grad_norm: Tensor) -> Measured:
        """Of all ranks, from this one's share of the loss."""
        return over_ranks(loss, grad_norm)

    def update(self) -> None:
        """Has optimizer and schedule take the step."""
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def eval_step(self, batch: StepBatch) -> Tensor:
        """Mean cross-entropy over the target tokens of all ranks."""
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
        """Reads what any engine wrote."""
        load_state(self, folder)

    def pieces(self) -> Iterator[list[Piece]]:
        """Live pieces of everything that is trained, and of what is not."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        everywhere = (dist.get_rank(), dist.get_world_size())
        copy = (0, 1) if self.is_sharded else everywhere  # the shards of FSDP2 are no copies

        def place(parameter: nn.Parameter) -> Place:
            return names[parameter], Region.whole(parameter.shape), copy

        yield from pieces_of(held(self.optimizer), place)
        yield untrained_pieces(self.model, everywhere)

    def progress(self) -> dict[str, Any]:
        """Where the schedule stands."""
        return {"schedule": self.scheduler.last_epoch}

    def resumed(self, progress: dict[str, Any]) -> None:
        """Goes on from written pieces."""
        resume_schedule(self.scheduler, progress["schedule"])

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, under its Hugging Face name, as the forward pass reads it; tied ones once."""
        for name, parameter in self.model.named_parameters():
            yield name, _whole(parameter.detach()).to(self.weight_dtype).cpu().clone()

    def describe(self) -> dict[str, Any]:
        """Versions and classes that run, the device and the backend."""
        return {
            "engine": f"accelerate {accelerate.__version__}, {type(self.engine).__name__}",
            "optimizer": type(self.optimizer).__name__,
            "device": str(self.device),
            "backend": dist.get_backend(),
        }

    def _reshard(self) -> None:
        """FSDP2 keeps what a forward pass has gathered for a backward pass, and would save that for the shards."""
        for module in self.engine.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _autocast(self) -> AbstractContextManager[object]:
        is_on = self.plan.recipe.parallel.precision == "autocast_bf16"
        context: AbstractContextManager[object] = self.accelerator.autocast() if is_on else nullcontext()
        return context


class AcceleratedDeepSpeed(DeepSpeedEngine):
    """DeepSpeed with the same configuration and files, initialised and stepped by Accelerate."""

    def _initialise(self, ds_config: dict[str, Any]) -> _Engine:
        recipe = self.plan.recipe
        optim = recipe.optim
        with _undisturbed():
            self.accelerator = _accelerator_deepspeed(self.plan, ds_config, self.device)
            groups = parameter_groups(self.model, optim.weight_decay)
            optimizer = DummyOptim(groups, lr=optim.lr, weight_decay=optim.weight_decay)
            scheduler = DummyScheduler(optimizer, lr_scheduler_callable=lambda inner: schedule(inner, recipe))
            engine: _Engine = self.accelerator.prepare(self.model, optimizer, scheduler)[0]
        # Else `transformers` would partition the next model that this process builds by itself.
        unset_hf_deepspeed_config()
        # `accelerator.backward` calls it after the last micro-batch, before the norm is taken.
        self._own_step, engine.step = engine.step, lambda: None
        return engine

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds the gradients of a micro-batch."""
        self.accelerator.sync_gradients = is_last
        self.accelerator.backward(loss, scale_wrt_gas=False)

    def _step(self) -> None:
        self._own_step()

    def describe(self) -> dict[str, Any]:
        """The same, with accelerate's version."""
        described = super().describe()
        return {**described, "engine": f"accelerate {accelerate.__version__}, {described['engine']}"}


def _accelerator_ddp(plan: Plan, device: torch.device) -> accelerate.Accelerator:
    _join_group(device)
    return _checked(
        accelerate.Accelerator(
            cpu=device.type == "cpu",
            mixed_precision=MIXED_PRECISION[plan.recipe.parallel.precision],
            # Buffers are the same on all ranks: nothing that a step computes goes into them.
            kwargs_handlers=[
                DistributedDataParallelKwargs(
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                    # An expert that no token of a rank has chosen.
                    find_unused_parameters=plan.model.experts > 0 or plan.model.expert_modules,
                )
            ],
        )
    )


def _accelerator_sharded(plan: Plan, model: PreTrainedModel, device: torch.device) -> accelerate.Accelerator:
    """FSDP2 over all ranks, a unit for each decoder layer. Raises RecipeError where layers share weights."""
    layers = decoder_layers(model)[1]
    _check_unshared(layers, plan.model.model_type)
    is_bf16 = plan.recipe.parallel.precision == "bf16"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=plan.layout.zero_stage == 3,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted({type(layer).__name__ for layer in layers}),
        # Gradients are summed, over micro-batches and over ranks, in fp32.
        mixed_precision_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if is_bf16 else None, reduce_dtype=torch.float32
        ),
        cpu_offload=False,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=False,
    )
    _join_group(device)
    if device.type == "cpu":
        # accelerate 1.15 takes a plugin for FSDP on devices only, and would run DistributedDataParallel
        # on CPUs without a word. FSDP2 itself runs there, so its state is told of a device.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    return _checked(
        accelerate.Accelerator(mixed_precision=MIXED_PRECISION[plan.recipe.parallel.precision], fsdp_plugin=plugin)
    )


def _check_unshared(layers: Iterable[nn.Module], model_type: str) -> None:
    """A weight that two units hold breaks FSDP2 off with a TypeError in its first pass."""
    holders = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    if any(number > 1 for number in holders.values()):
        message = f"'fsdp2' was given, but decoder layers of '{model_type}' share weights, and each is sharded alone"
        fix = "--set parallel.accelerate=ddp --set parallel.zero_stage=0"
        raise RecipeError(Problem("accelerate.shared_layers", "parallel.accelerate", message, fix))


def _accelerator_deepspeed(plan: Plan, ds_config: dict[str, Any], device: torch.device) -> accelerate.Accelerator:
    _join_group(device)
    return _checked(
        accelerate.Accelerator(
            mixed_precision="no",  # the configuration says it
            gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config),
        )
    )


def _join_group(device: torch.device) -> None:
    """Makes accelerate's state anew, from the process group that is there.

    Without `cpu=True` it would, on a CPU, take itself for the only process, whatever the group.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState(cpu=device.type == "cpu")


def _checked(accelerator: accelerate.Accelerator) -> accelerate.Accelerator:
    """Raises RecipeError where accelerate sees another group: its workers would train models of their own."""
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

    The plan alone decides. What one engine leaves, ACCELERATE_USE_FSDP for one, would change the next of the process.
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
