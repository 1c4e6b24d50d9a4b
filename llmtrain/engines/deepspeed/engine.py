"""The DeepSpeed engine: ZeRO 0 to 3, offload and every precision. Each `EngineAxis` divides the model further."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine as _Engine
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from transformers import PreTrainedModel

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines.deepspeed.axis import EngineAxis, WeightShard, overriding
from llmtrain.engines.deepspeed.partitioned import build_partitioned, gather_partitioned, partition_with
from llmtrain.engines.deepspeed.pipeline import PipelineAxis
from llmtrain.engines.divergence import estimate_divergence
from llmtrain.engines.engine import Accumulated, ChangeGradients, OwnPasses, Passes, StepResult
from llmtrain.engines.forward import (
    check_kernels,
    forward,
    next_logits,
    objective_of,
    own_metrics_of,
    run_model,
    use_kernels,
)
from llmtrain.engines.guard import (
    Guard,
    LossAndNorm,
    check_fused,
    finite_or_infinite,
    reduce_loss_and_norm,
    step_with_verdict,
)
from llmtrain.engines.optim import (
    averaged_weights,
    gradients_of,
    groups_for,
    locate_shards,
    named_gradients,
    parameter_groups,
    resume_schedule,
    schedule,
    torch_optimizer,
)
from llmtrain.engines.state.optimizer_shards import OptimizerShard, optimizer_shards
from llmtrain.engines.state.save_load import (
    PROGRESS_FILE,
    HasState,
    Locate,
    checkpoint_shards,
    shape_of,
    untrained_shards,
)
from llmtrain.engines.state.shards import CheckpointShard, ReplicaIndex, ShardLocation, WeightSlice
from llmtrain.errors import CheckpointError, Problem, RecipeError
from llmtrain.models import OwnMetrics, build_model, build_sharded, model_configuration
from llmtrain.models.adapter import weight_name
from llmtrain.models.documents import per_document
from llmtrain.models.nf4 import named_weights
from llmtrain.models.precision import weight_dtype
from llmtrain.models.recompute.checkpoints import gathers_whole_layers, require_input_gradient
from llmtrain.models.stages import decoder_layers
from llmtrain.overrides.deepspeed import (
    NormWithLoss,
    clip_by,
    counted_by_another_stage,
    last_norm,
    leave_muon_eager,
    loss_scalers,
    no_host_checks,
    reduce_among_several,
    synchronize_on_device,
    update_model_weights,
)
from llmtrain.overrides.torch import squared_norm
from llmtrain.plan import Plan
from llmtrain.plan.axes import DATA

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Attributes of DeepSpeed's engine."""
GROUPS = ("data_parallel_group", "sequence_parallel_group", "tensor_parallel_group", "expert_replica_group")
"""Process groups that an axis may determine, by the names of its properties."""

Initialise = Callable[..., _Engine]


def initialise(
    module: nn.Module,
    groups: list[dict[str, Any]],
    plan: Plan,
    ds_config: dict[str, Any],
    device: torch.device,
    mpu: Any = None,
) -> _Engine:
    """Calls `deepspeed.initialize` with model, groups, schedule and, if `ds_config` has none, the optimizer.

    mpu: DeepSpeed's name for the object that describes process groups.
    """

    def optimizer(groups: list[dict[str, Any]]) -> Optimizer:
        optim = plan.recipe.optim.with_warmup_steps(plan.recipe.train.steps)
        return torch_optimizer(groups, optim, code_dir=plan.recipe.code_dir, tried=plan.optimizer)

    engine: _Engine = deepspeed.initialize(
        model=module,
        optimizer=None if "optimizer" in ds_config else optimizer,
        model_parameters=groups,
        lr_scheduler=lambda optimizer: schedule(optimizer, plan.recipe),
        mpu=mpu,
        config=ds_config,
    )[0]
    return engine


class DeepSpeedEngine(HasState):
    """Trains a causal LM, divided by `axes`; ZeRO replicates or shards the parts over the remaining ranks."""

    def __init__(
        self,
        plan: Plan,
        ds_config: dict[str, Any],
        device: torch.device,
        axes: Sequence[EngineAxis] = (),
        initialise: Initialise = initialise,
        prepared_by: str = "",
    ) -> None:
        """axes: those with a degree above 1. initialise: makes DeepSpeed's engine. prepared_by: the library through
        which it does so, as a prefix for the run's record; empty if none.

        Raises RecipeError for a model that one of the axes cannot divide.
        """
        self.plan = plan
        self.device = device
        self.axes = axes
        self._prepared_by = prepared_by
        self._pipeline = next((axis for axis in axes if isinstance(axis, PipelineAxis)), None)
        self._axis_with = {name: overriding(axes, name) for name in (*GROUPS, "mpu", "named_weights")}
        recipe = plan.recipe

        leave_muon_eager()
        config = model_configuration(recipe)
        check_kernels(config, plan)  # on all ranks, so that all of them raise the error
        for axis in axes:
            axis.prepare(ds_config)

        self.module = self._build(ds_config)
        self._place(self.module)
        self.model: Any = self._pipeline.model if self._pipeline else self.module
        self._use_kernels_and_recomputation()

        if mpu_axis := self._axis_with["mpu"]:
            initialise = partial(initialise, mpu=mpu_axis.mpu)
        self.engine = initialise(self.module, self._parameter_groups(), plan, ds_config, device)
        reduce_among_several(self.engine)
        synchronize_on_device(self.engine.optimizer)
        self._norm_with_loss = NormWithLoss.of(self.engine.optimizer, plan.parallel)
        for axis in axes:
            axis.attach(self.engine)

        self.objective = objective_of(recipe, config, self._group("sequence_parallel_group"))
        self.own_metrics = own_metrics_of(recipe)
        shard_lists, locate = self._optimizer_shards()
        locate_shards(self.engine.basic_optimizer, self.engine.optimizer, shard_lists, locate, recipe, device)
        self.guard = Guard(recipe.guard, device)
        check_fused(self.engine.basic_optimizer)

    def _use_kernels_and_recomputation(self) -> None:
        """Configures the model, or each stage of it, before DeepSpeed takes it."""
        recipe = self.plan.recipe
        for model, has_head in self.models():
            use_kernels(model, self.plan, has_head)
        if self.plan.parallel.zero_stage == 3:
            # Ranks call what is within a part that computes each document on its own a different number of times.
            of_layers = gathers_whole_layers(recipe)
            for module in decoder_layers(self.model)[1] if of_layers else per_document(self.model):
                set_z3_leaf_module(module, True)
                module.register_forward_pre_hook(require_input_gradient, with_kwargs=True)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        optim = self.plan.recipe.optim
        models = (model for model, _ in self.models())
        groups = groups_for(optim, models, parameter_groups(self.module, optim.weight_decay))
        for axis in self.axes:
            groups = axis.parameter_groups(groups)
        return groups

    def _build(self, ds_config: dict[str, Any]) -> Any:
        """Returns the module that DeepSpeed trains, with its weights: the model, or a pipeline of stages."""
        shardings = [sharding for axis in self.axes if (sharding := axis.sharding()) is not None]
        if self._pipeline:
            return self._pipeline.build(shardings)
        recipe, replicas = self.plan.recipe, self._group("data_parallel_group")
        dtype, partitions = weight_dtype(recipe.parallel.precision), self.plan.parallel.zero_stage == 3
        if not shardings:
            if partitions:
                return build_partitioned(recipe, dtype, ds_config, self.device)
            return build_model(recipe, dtype, self.device)
        if not partitions:
            return build_sharded(recipe, dtype, self.device, shardings)
        mpu_axis = self._axis_with["mpu"]
        partition = partition_with(ds_config, replicas, mpu_axis.mpu if mpu_axis else None)

        def place(part: nn.Module) -> None:
            self._place(part)
            partition(part)

        groups = [replicas, *([experts] if (experts := self._group("expert_replica_group")) else [])]
        is_reader = any(dist.get_rank(group) == 0 for group in groups)
        return build_sharded(recipe, dtype, self.device, shardings, place, gather_partitioned, is_reader)

    def _place(self, module: nn.Module) -> None:
        for axis in self.axes:
            axis.place(module)

    def models(self) -> list[tuple[PreTrainedModel, bool]]:
        """Returns the model, or that of each stage of this rank, and whether the loss is computed from its output."""
        return self._pipeline.models() if self._pipeline else [(self.model, True)]

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's replica."""
        return dist.get_rank() // self.plan.stride(DATA) % self.plan.data_parallel_size

    def train_step(self, batch: StepBatch, change_gradients: ChangeGradients | None = None) -> StepResult:
        """Accumulates gradients over micro-batches, clips them, and updates the weights if the guard allows it."""
        if self.objective and self.objective.needs_divergence:
            estimate_divergence(self, [batch])
        with self._training():
            return self._update(self._accumulate(batch), change_gradients)

    @contextmanager
    def own_passes(self, batch: StepBatch, change_gradients: ChangeGradients | None = None) -> Iterator[OwnPasses]:
        """Returns the context of a step whose passes a loop of the user's own makes."""
        if self._pipeline:
            message = f"{self.plan.parallel.pipeline}: a pipeline makes its passes by itself"
            fix = 'parallel.pipeline=1, or give your loss as objective=Custom("mine:loss") and call engine.train_step'
            raise RecipeError(Problem("loop.pipeline", "parallel.pipeline", message, fix))
        with self._training():
            passes = OwnPasses(batch, self.device, self._run_model, self._backward, self._slice)
            yield passes
            passes.result = self._update(passes.accumulated(), change_gradients)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """The context of a step."""
        with self._active(), no_host_checks(self.plan.recipe.parallel.precision):
            if not self.model.training:  # visiting every module costs as much as a small update
                self.engine.train()
            yield

    def _accumulate(self, batch: StepBatch) -> Accumulated:
        """Accumulates the gradients of this rank's micro-batches."""
        if self.objective:
            self.objective.begin()
        if self._pipeline:
            return self._pipeline.accumulate(batch, self._slices(batch), self.objective)
        passes = Passes(batch, self.device)
        for micro_batch in batch.micro_batches:
            self._backward(passes, *self._forward(micro_batch))
        return passes.accumulated()

    def _backward(self, passes: Passes, loss_sum: Tensor, auxiliary: Tensor | None) -> None:
        """Accumulates the gradients of a micro-batch. DeepSpeed averages gradients over ranks."""
        loss = loss_sum * (self.plan.gradient_ranks / passes.divisor)
        if auxiliary is not None:
            loss = loss + auxiliary / passes.number
        for axis in self.axes:
            axis.before_backward()
        self.engine.backward(loss, scale_wrt_gas=False)
        if not passes.at_last:
            self.engine.step()  # counts the micro-batch; only the step after the last one updates
        passes.add(loss_sum, auxiliary)

    def _update(self, accumulated: Accumulated, change_gradients: ChangeGradients | None) -> StepResult:
        """Takes the norm, clips by it, and updates the weights if the guard allows it."""
        lr = self.learning_rate
        if change_gradients:
            change_gradients(named_gradients(self.model, {}))
        # A pipeline's norm is taken in `decide`. That is too late to clip by it, but then the rules allow none.
        grad_norm = None if self._pipeline else self._norm_unless_deepspeed_keeps_it()
        if grad_norm is not None:
            clip_by(self.engine, grad_norm)
        # The same reduction gives DeepSpeed the norm that it uses within its step.
        reduced_loss = self._norm_with_loss.take(accumulated.loss) if self._norm_with_loss else None

        @torch.no_grad()
        def decide(overflowed: Tensor | None) -> tuple[LossAndNorm, Tensor]:
            norm = self._norm_within_step() if grad_norm is None else grad_norm
            if reduced_loss is None:
                measured = reduce_loss_and_norm(accumulated.loss, norm, replicas=self.plan.parallel.tensor)
            else:
                measured = LossAndNorm(reduced_loss, finite_or_infinite(norm))
            return measured, self.guard.should_skip(measured, overflowed)

        step = self._pipeline.step if self._pipeline else self.engine.step
        measured = step_with_verdict(step, self.engine.basic_optimizer, decide, self.device)
        return StepResult(measured.loss, measured.grad_norm, lr, accumulated.router_loss)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        rate: float = self.engine.get_lr()[0]
        return rate

    def _forward(self, micro_batch: MicroBatch, metrics: OwnMetrics | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns this rank's sum of losses, and the auxiliary loss of a mixture of experts."""
        batch = self._slice(micro_batch)
        return forward(self.engine, self.model, batch, self.device, self.objective, micro_batch, metrics)

    def _run_model(self, batch: MicroBatch, whole: MicroBatch) -> tuple[Any, Tensor | None]:
        return run_model(self.engine, self.model, batch, whole, self.device)

    @torch.no_grad()
    def eval_step(self, batch: StepBatch) -> Tensor:
        """Returns the mean loss over the items of all ranks."""
        if self.objective:
            self.objective.begin()
        if self.own_metrics:
            self.own_metrics.begin()
        with self.averaged(), self._active():
            self.engine.eval()
            total = self._evaluate(batch)
        return self._sum_over_replicas(total) / batch.divisor

    def next_logits(self, batch: MicroBatch) -> dict[int, Tensor]:
        """Returns the logits of the token after the position with a label, by row; empty before the last stage."""
        with self._active():
            self.engine.eval()
            if self._pipeline:
                return self._pipeline.next_logits(batch, self._slice(batch))
            return next_logits(self.engine, self.model, self._slice(batch), self.device, batch)

    def metric_sums(self) -> Tensor | None:
        """Returns the sums over the last batch, of all ranks."""
        return None if self.objective is None else self._sum_over_replicas(self.objective.metric_sums(self.device))

    def own_metric_sums(self) -> Tensor:
        """Returns the sums of `own_metrics` over the last batch, of all ranks."""
        assert self.own_metrics is not None
        return self._sum_over_replicas(self.own_metrics.sums(self.device))

    def _evaluate(self, batch: StepBatch) -> Tensor:
        """Returns this rank's sum of losses."""
        if self._pipeline:
            return self._pipeline.evaluate(batch, self._slices(batch), self.objective, self.own_metrics)
        total = torch.zeros((), device=self.device)
        for micro_batch in batch.micro_batches:
            total += self._forward(micro_batch, self.own_metrics)[0]
        return total

    def checkpoint_shards(self) -> Iterator[list[CheckpointShard]]:
        """Yields the tensors trained on this rank as shards, then the untrained ones."""
        yield from checkpoint_shards(*self._optimizer_shards())
        omits_base_weights = self.plan.recipe.model.omits_base_weights
        frozen = [
            parameter for parameter in self.model.parameters() if not (parameter.requires_grad or omits_base_weights)
        ]
        with gather_partitioned(frozen) if frozen and self.plan.parallel.zero_stage == 3 else nullcontext():
            replica = ReplicaIndex.of_rank(self._group("data_parallel_group")).times(self._tensor_parallel_replica)
            yield untrained_shards(
                self.model, replica, omits_base_weights, self._hugging_face_name, self._locate_untrained
            )

    def _optimizer_shards(self) -> tuple[Iterable[list[OptimizerShard]], Locate]:
        """Returns what the optimizer holds on this rank, and a function that locates it in whole weights."""
        own = {parameter for model, _ in self.models() for parameter in model.parameters()}  # leaves out `Stage.idle`
        names = {parameter: name for name, parameter in self.model.named_parameters() if parameter in own}
        lists = optimizer_shards(self.engine.optimizer)
        own_lists = ([shard for shard in shards if shard.parameter in names] for shards in lists)
        return own_lists, lambda parameter: self._locate(names[parameter], parameter)

    def progress(self) -> dict[str, Any]:
        """Returns the counters."""
        return {
            "schedule": self.engine.lr_scheduler.last_epoch,
            "deepspeed": {name: getattr(self.engine, name) for name in COUNTERS},
            "loss_scale": self._loss_scale(),
        }

    def resumed(self, progress: dict[str, Any]) -> None:
        """Restores the model's weights and DeepSpeed's counters after the optimizer's tensors have been loaded.

        Counters that only DeepSpeed keeps are missing if another engine wrote the checkpoint. Raises CheckpointError if
        the saved loss scaler has other fields than this one.
        """
        update_model_weights(self.engine.optimizer)
        resume_schedule(self.engine.lr_scheduler, progress["schedule"])
        for name, value in progress.get("deepspeed", {"global_steps": progress["schedule"]}).items():
            setattr(self.engine, name, value)
        saved, scalers, current = progress.get("loss_scale", {}), loss_scalers(self.engine), self._loss_scale()
        for name in saved.keys() & scalers.keys():
            if saved[name].keys() != current[name].keys():
                fields, needed = ", ".join(sorted(saved[name])), ", ".join(sorted(current[name]))
                message = f"for '{name}', it contains {fields} instead of {needed}"
                raise CheckpointError(Problem("checkpoint.progress", PROGRESS_FILE, message))
            if name == "loss_scaler":
                vars(scalers[name]).update(saved[name])
            else:
                scalers[name].load_state_dict(saved[name])

    def _loss_scale(self) -> dict[str, dict[str, Any]]:
        scalers = loss_scalers(self.engine)
        states = {}
        if "loss_scaler" in scalers:
            values = vars(scalers["loss_scaler"])
            states["loss_scaler"] = {key: value for key, value in values.items() if isinstance(value, int | float)}
        if "gradscaler" in scalers:
            states["gradscaler"] = scalers["gradscaler"].state_dict()
        return states

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every whole weight of this rank's replica under its Hugging Face name; tied weights once."""
        if self.plan.parallel.zero_stage == 3:
            # The passes of `reference_model` may leave layers that ZeRO-3 is still prefetching, and cannot release
            # before they have arrived ("Cannot partition a param in flight").
            self.engine.empty_partition_cache()
        axis = self._axis_with["named_weights"]
        named = axis.named_weights(self._full_tensor) if axis else None
        if named is None:
            named = ((name, self._full_tensor(weight)) for name, weight in named_weights(self.model))
        with self.averaged():
            for name, weight in named:
                yield weight_name(name), weight.cpu()

    def averaged(self) -> AbstractContextManager[None]:
        """Returns the context in which evaluations run."""
        outer = self.engine.optimizer
        return averaged_weights(self.engine.basic_optimizer, outer, lambda: update_model_weights(outer))

    def close(self) -> None:
        """Removes DeepSpeed's hooks, which autograd holds and which refer to the optimizer."""
        self.engine.destroy()

    def describe(self) -> dict[str, Any]:
        """Returns the classes that DeepSpeed has chosen, this rank's pipeline stage, the device and the backend."""
        of_axes = {key: value for axis in self.axes for key, value in axis.describe().items()}
        return {
            "engine": f"{self._prepared_by}deepspeed {deepspeed.__version__}",
            **of_axes,
            "optimizer": type(self.engine.optimizer).__name__,
            "basic_optimizer": type(self.engine.basic_optimizer).__name__,
            "device": str(self.device),
            "backend": dist.get_backend(),
        }

    @contextmanager
    def _active(self) -> Iterator[None]:
        with ExitStack() as stack:
            for axis in self.axes:
                stack.enter_context(axis.active())
            yield

    def _slice(self, batch: MicroBatch) -> MicroBatch:
        """Returns this rank's part of a micro-batch of its replica."""
        for axis in self.axes:
            batch = axis.slice(batch)
        return batch

    def _slices(self, batch: StepBatch) -> list[MicroBatch]:
        """Returns this rank's part of each micro-batch of its replica."""
        return [self._slice(micro_batch) for micro_batch in batch.micro_batches]

    def _sum_over_replicas(self, value: Tensor) -> Tensor:
        """Sums the values of all ranks for a batch; tensor parallel ranks have equal values."""
        if self._pipeline:
            return self._pipeline.sum_over_replicas(value)
        if self.plan.gradient_ranks > 1:
            dist.all_reduce(value, group=self._group("data_parallel_group"))
        return value

    def _norm_unless_deepspeed_keeps_it(self) -> Tensor | None:
        """Returns the norm with fp32 weights at ZeRO-0, where DeepSpeed does not keep it; otherwise returns None.

        There, ZeRO does not divide gradients (an axis may), and they are averaged already between `backward` and
        `step` of the last micro-batch.
        """
        if self.plan.parallel.zero_stage > 0 or weight_dtype(self.plan.recipe.parallel.precision) != torch.float32:
            return None
        norm = self._compute_norm()
        scaler = loss_scalers(self.engine).get("gradscaler")
        return norm / scaler.get_scale() if scaler else norm

    def _compute_norm(self) -> Tensor:
        """Returns the 2-norm of the gradient of the whole model, of which axes may give shards to other ranks."""
        by_group: dict[dist.ProcessGroup | None, list[Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            if counted_by_another_stage(parameter):
                continue
            shard = self._weight_shard(name, parameter)
            # A rank without a gradient still takes part in the sum.
            by_group.setdefault(shard.group if shard else None, []).extend(gradients_of([parameter]))
        squares = {group: squared_norm(gradients, self.device) for group, gradients in by_group.items()}
        for group, square in squares.items():
            if group is not None:
                dist.all_reduce(square, group=group)
        total = torch.stack(list(squares.values())).sum()
        if self._pipeline:
            self._pipeline.sum_squares(total)
        return total.sqrt().float()

    def _norm_within_step(self) -> Tensor:
        """Returns the norm when it is called within DeepSpeed's step: the one that DeepSpeed keeps, if it does."""
        if (norm := self._norm_unless_deepspeed_keeps_it()) is not None:
            return norm
        return torch.as_tensor(last_norm(self.engine.optimizer), device=self.device, dtype=torch.float32)

    def _group(self, name: str) -> dist.ProcessGroup | None:
        """Returns the process group of an axis, one of `GROUPS`; None if no axis determines it."""
        axis = self._axis_with[name]
        group: dist.ProcessGroup | None = getattr(axis, name) if axis else None
        return group

    @property
    def _tensor_parallel_replica(self) -> ReplicaIndex:
        """Which replica of an undivided weight this rank holds within its tensor parallel group."""
        group = self._group("tensor_parallel_group")
        return ReplicaIndex() if group is None else ReplicaIndex.of_rank(group)

    def _weight_shard(self, name: str, tensor: Tensor) -> WeightShard | None:
        shards = [shard for axis in self.axes if (shard := axis.weight_shard(name, tensor))]
        if len(shards) > 1:
            raise ValueError(f"several axes divide {name}")
        return shards[0] if shards else None

    def _locate(self, name: str, parameter: nn.Parameter) -> ShardLocation:
        """Returns where this rank's shard of a trained parameter is in the whole weight."""
        shard, replica = self._weight_shard(name, parameter), ReplicaIndex()
        if self.plan.parallel.zero_stage == 0:  # ZeRO's shards are not replicas of each other
            replica = ReplicaIndex.of_rank(shard.replica_group if shard else self._group("data_parallel_group"))
        if self._pipeline:
            replica = replica.times(self._pipeline.tied_replica(name))
        if shard is None:
            weight_slice, replica = WeightSlice.whole(shape_of(parameter)), replica.times(self._tensor_parallel_replica)
        else:
            weight_slice = shard.weight_slice
        return ShardLocation(self._hugging_face_name(name), weight_slice, replica)

    def _locate_untrained(self, name: str, tensor: Tensor) -> tuple[WeightSlice, ReplicaIndex] | None:
        shard = self._weight_shard(name, tensor)
        return None if shard is None else (shard.weight_slice, ReplicaIndex.of_rank(shard.replica_group))

    def _hugging_face_name(self, name: str) -> str:
        for axis in self.axes:
            name = axis.hugging_face_name(name)
        return weight_name(name)

    def _full_tensor(self, parameter: Tensor) -> Tensor:
        """Returns a copy of a whole weight, of which this rank may hold a shard.

        All ranks that hold shards of the weight call it.
        """
        partitioned = self.plan.parallel.zero_stage == 3
        with deepspeed.zero.GatheredParameters([parameter]) if partitioned else nullcontext():
            weight = parameter.detach().clone()
        for axis in self.axes:
            weight = axis.full_tensor(parameter, weight)
        return weight
