"""The DeepSpeed engine: ZeRO 0 to 3, offload, every precision; the parts of `axis.py` divide the model further."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.moe.utils import configure_moe_param_groups
from deepspeed.runtime.engine import DeepSpeedEngine as _Engine
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from transformers import PreTrainedModel

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines.deepspeed.axis import EngineAxis, Portion, owner
from llmtrain.engines.deepspeed.partitioned import build_partitioned, gather_partitioned
from llmtrain.engines.deepspeed.pipeline import PipelineAxis
from llmtrain.engines.divergence import estimate_divergence
from llmtrain.engines.engine import Accumulated, StepResult, with_router_loss
from llmtrain.engines.forward import (
    check_kernels,
    forward,
    next_logits,
    objective_of,
    use_kernels,
)
from llmtrain.engines.guard import Guard, Measured, check_fused, finite_or_infinite, over_ranks, skip_if
from llmtrain.engines.optim import (
    averaged_weights,
    gradients_of,
    groups_for,
    locate_matrices,
    parameter_groups,
    resume_schedule,
    schedule,
    torch_optimizer,
)
from llmtrain.engines.state.held import HeldState, held
from llmtrain.engines.state.pieces import Piece, Region
from llmtrain.engines.state.save_load import (
    PROGRESS_FILE,
    HasState,
    Place,
    multiplied,
    pieces_of,
    shape_of,
    untrained_pieces,
)
from llmtrain.errors import CheckpointError, Problem
from llmtrain.models import build_model, model_configuration
from llmtrain.models.adapter import weight_name
from llmtrain.models.nf4 import named_weights
from llmtrain.models.precision import weight_dtype
from llmtrain.models.recompute.checkpoints import gathers_layers, give_input_gradient, use_recomputation
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
    step_with_verdict,
    synchronize_on_device,
    update_model_weights,
)
from llmtrain.overrides.peft import adapters_without_weight
from llmtrain.overrides.torch import squared_norm
from llmtrain.plan import Plan
from llmtrain.plan.axes import DATA

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Attributes of DeepSpeed's engine."""

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

    mpu: DeepSpeed's name for the grid of an axis.
    """

    def optimizer(groups: list[dict[str, Any]]) -> Optimizer:
        # With an optimizer in `ds_config`, DeepSpeed itself puts the experts that it has distributed into groups.
        made = configure_moe_param_groups(groups) if plan.parallel.expert > 1 else groups
        return torch_optimizer(made, plan.recipe.optim)

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
        """axes: those with a degree above 1. initialise: makes DeepSpeed's engine, directly or through `prepared_by`.

        Raises RecipeError for a model that one of the axes cannot divide.
        """
        self.plan = plan
        self.device = device
        self.axes = axes
        self._pipeline = next((axis for axis in axes if isinstance(axis, PipelineAxis)), None)
        self._grid, self._groups, self._sliced, self._copied, self._renamed = (
            owner(axes, name) for name in ("grid", "replicas", "slices", "copies", "named_weights")
        )
        recipe = plan.recipe
        leave_muon_eager()
        check_kernels(model_configuration(recipe), plan)  # on all ranks, so that all of them raise the error
        for axis in axes:
            axis.prepare(ds_config)
        self.module = self._build(ds_config)
        self.model: Any = self._pipeline.model if self._pipeline else self.module
        for model, has_head in self.models():
            # By layers, as in every engine. DeepSpeed's interval would count stages, because it does not see layers.
            use_recomputation(model, recipe.parallel)
            use_kernels(model, plan, has_head)
        if plan.parallel.zero_stage == 3 and gathers_layers(recipe):
            for layer in decoder_layers(self.model)[1]:
                set_z3_leaf_module(layer, True)
                layer.register_forward_pre_hook(give_input_gradient, with_kwargs=True)
        models = (model for model, _ in self.models())
        groups = groups_for(recipe.optim, models, parameter_groups(self.module, recipe.optim.weight_decay))
        for axis in axes:
            groups = axis.parameter_groups(groups)
        if self._grid:
            initialise = partial(initialise, mpu=self._grid.grid)
        with adapters_without_weight() if recipe.model.adapter else nullcontext():
            self.engine = initialise(self.module, groups, plan, ds_config, device)
        self._prepared_by = prepared_by
        reduce_among_several(self.engine)
        synchronize_on_device(self.engine.optimizer)
        self._norm_with_loss = NormWithLoss.of(self.engine.optimizer, plan.parallel)
        for axis in axes:
            axis.attach(self)
        self.objective = objective_of(recipe, self._sliced.slices if self._sliced else None)
        locate_matrices(self.engine.basic_optimizer, self.engine.optimizer, *self._held(), recipe, device)
        self.guard = Guard(recipe.guard, device)
        check_fused(self.engine.basic_optimizer)

    def _build(self, ds_config: dict[str, Any]) -> Any:
        """Returns the module that DeepSpeed trains, with its weights: the model, or a pipeline of its stages."""
        builder = owner(self.axes, "build")
        if builder and (built := builder.build(ds_config)) is not None:
            return built
        recipe = self.plan.recipe
        dtype = weight_dtype(recipe.parallel.precision)
        if self.plan.parallel.zero_stage == 3:
            return build_partitioned(recipe, dtype, ds_config, self.device, self._replicas)
        return build_model(recipe, dtype, self.device)

    def models(self) -> list[tuple[PreTrainedModel, bool]]:
        """Returns the model, or that of each stage of this rank, and whether the loss is computed from its output."""
        return self._pipeline.models() if self._pipeline else [(self.model, True)]

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's replica."""
        return dist.get_rank() // self.plan.stride(DATA) % self.plan.data_parallel_size

    def train_step(self, batch: StepBatch) -> StepResult:
        """Accumulates this rank's micro-batches, takes the norm, lets the guard decide, and updates once."""
        estimate_divergence(self, [batch])
        lr = self.learning_rate
        with self._active(), no_host_checks(self.plan.recipe.parallel.precision):
            passed = self._pipeline.accumulate(batch) if self._pipeline else self._accumulate(batch)
            # The rules allow no clipping in a pipeline at ZeRO-0, so its norm can be taken within the step as well.
            own_norm = None if self._pipeline else self._replicated_grad_norm()
            if own_norm is not None:
                clip_by(self.engine, own_norm)
            loss = self._norm_with_loss.take(passed.loss) if self._norm_with_loss else None

            @torch.no_grad()
            def decide(overflowed: Tensor | None) -> tuple[Measured, Tensor]:
                norm = self._norm_of_step() if own_norm is None else own_norm
                if loss is None:
                    measured = over_ranks(passed.loss, norm, copies=self.plan.parallel.tensor)
                else:
                    measured = Measured(loss, finite_or_infinite(norm))
                return measured, self.guard.judge(measured, overflowed)

            step = self._pipeline.step if self._pipeline else self.engine.step
            measured, _ = step_with_verdict(step, self.engine.basic_optimizer, decide, skip_if, self.device)
        return StepResult(measured.loss, measured.grad_norm, lr, passed.router_loss)

    def _accumulate(self, batch: StepBatch) -> Accumulated:
        """Accumulates the gradients of this rank's micro-batches."""
        if not self.model.training:  # visiting every module costs as much as a small update
            self.engine.train()
        if self.objective:
            self.objective.begin()
        total, router_loss = torch.zeros((), device=self.device), None
        for index, micro_batch in enumerate(batch.micro_batches, start=1):
            loss_sum, auxiliary = self._forward(micro_batch)
            loss = self.weigh(loss_sum, batch.terms)
            if auxiliary is not None:  # DeepSpeed averages its gradients over ranks, too
                loss = loss + auxiliary / len(batch.micro_batches)
                router_loss = with_router_loss(router_loss, auxiliary)
            for axis in self.axes:
                axis.before_backward()
            self.engine.backward(loss, scale_wrt_gas=False)
            if index < len(batch.micro_batches):
                self.engine.step()  # counts the micro-batch; only the step after the last one updates
            total += loss_sum.detach()
        return Accumulated(total / batch.terms, router_loss)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        rate: float = self.engine.get_lr()[0]
        return rate

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Returns this rank's sum of losses, and the auxiliary loss of a mixture of experts."""
        own = self.slice(micro_batch)
        return forward(self.engine, self.model, own, self.device, self.objective, micro_batch)

    def weigh(self, loss_sum: Tensor, terms: int) -> Tensor:
        """Scales a loss by the number of ranks with different tokens, over which DeepSpeed averages gradients."""
        return loss_sum * (self.plan.holders / terms)

    @torch.no_grad()
    def eval_step(self, batch: StepBatch) -> Tensor:
        """Returns the mean loss over the terms of all ranks."""
        if self.objective:
            self.objective.begin()
        with self.averaged(), self._active():
            total = self._pipeline.evaluate(batch) if self._pipeline else self._evaluate(batch)
        return self._sum_over_replicas(total) / batch.terms

    def next_logits(self, batch: MicroBatch) -> dict[int, Tensor]:
        """Returns the logits of the token after the position with a label, by row; empty before the last stage."""
        with self._active():
            if self._pipeline:
                return self._pipeline.next_logits(batch)
            self.engine.eval()
            return next_logits(self.engine, self.model, self.slice(batch), self.device, batch)

    def rewards(self) -> Tensor | None:
        """Returns the sums of the last batch's rewards over all ranks."""
        return None if self.objective is None else self._sum_over_replicas(self.objective.rewards(self.device))

    def _evaluate(self, batch: StepBatch) -> Tensor:
        """Returns this rank's sum of losses."""
        self.engine.eval()
        total = torch.zeros((), device=self.device)
        for micro_batch in batch.micro_batches:
            total += self._forward(micro_batch)[0]
        return total

    def pieces(self) -> Iterator[list[Piece]]:
        """Yields live pieces of all tensors trained on this rank, then of the untrained ones."""
        yield from pieces_of(*self._held())
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        leaves_base = self.plan.recipe.model.leaves_base
        frozen = [one for one in names if not (one.requires_grad or leaves_base)]
        with gather_partitioned(frozen) if frozen and self.plan.parallel.zero_stage == 3 else nullcontext():
            equal = multiplied(_place_in(self._replicas), self._copies)
            yield untrained_pieces(self.model, equal, leaves_base, self._hugging_face_name, self._untrained_portion)

    def _held(self) -> tuple[Iterator[list[HeldState]], Callable[[nn.Parameter], Place]]:
        """Returns the tensors that the optimizer holds on this rank, and the regions of weights that they belong to."""
        own = {one for model, _ in self.models() for one in model.parameters()}  # leaves out `Stage.idle`
        names = {parameter: name for name, parameter in self.model.named_parameters() if parameter in own}
        trained = ([one for one in some if one.parameter in names] for some in held(self.engine.optimizer))
        return trained, lambda one: self._place(names[one], one)

    def progress(self) -> dict[str, Any]:
        """Returns the counters."""
        return {
            "schedule": self.engine.lr_scheduler.last_epoch,
            "deepspeed": {name: getattr(self.engine, name) for name in COUNTERS},
            "loss_scale": self._loss_scale(),
        }

    def resumed(self, progress: dict[str, Any]) -> None:
        """Restores the model's weights and the counters after the optimizer's tensors have been loaded.

        Counters that only DeepSpeed keeps are missing if another engine wrote the checkpoint. Raises CheckpointError if
        the saved loss scaler has other fields than this one.
        """
        update_model_weights(self.engine.optimizer)
        resume_schedule(self.engine.lr_scheduler, progress["schedule"])
        for name, value in progress.get("deepspeed", {"global_steps": progress["schedule"]}).items():
            setattr(self.engine, name, value)
        saved, scalers, own = progress.get("loss_scale", {}), loss_scalers(self.engine), self._loss_scale()
        for name in saved.keys() & scalers.keys():
            if saved[name].keys() != own[name].keys():
                found, needed = ", ".join(sorted(saved[name])), ", ".join(sorted(own[name]))
                message = f"for '{name}', it contains {found} instead of {needed}"
                raise CheckpointError(Problem("checkpoint.progress", PROGRESS_FILE, message))
            if name == "loss_scaler":
                vars(scalers[name]).update(saved[name])
            else:
                scalers[name].load_state_dict(saved[name])

    def _loss_scale(self) -> dict[str, dict[str, Any]]:
        scalers = loss_scalers(self.engine)
        found = {}
        if "loss_scaler" in scalers:
            values = vars(scalers["loss_scaler"])
            found["loss_scaler"] = {key: value for key, value in values.items() if isinstance(value, int | float)}
        if "gradscaler" in scalers:
            found["gradscaler"] = scalers["gradscaler"].state_dict()
        return found

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every whole weight of this rank's replica under its Hugging Face name; tied weights once."""
        if self.plan.parallel.zero_stage == 3:
            # The passes of `reference_model` may leave layers that ZeRO-3 is still prefetching, and cannot release
            # before they have arrived ("Cannot partition a param in flight").
            self.engine.empty_partition_cache()
        named = self._renamed.named_weights(self._whole) if self._renamed else None
        with self.averaged():
            for name, weight in named or ((name, self._whole(one)) for name, one in named_weights(self.model)):
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
        own = {key: value for axis in self.axes for key, value in axis.describe().items()}
        return {
            "engine": f"{self._prepared_by}deepspeed {deepspeed.__version__}",
            **own,
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

    def slice(self, batch: MicroBatch) -> MicroBatch:
        """Returns this rank's part of a micro-batch of its replica."""
        for axis in self.axes:
            batch = axis.slice(batch)
        return batch

    def _sum_over_replicas(self, value: Tensor) -> Tensor:
        """Sums the values of all ranks for a batch; tensor parallel ranks have equal values."""
        if self._pipeline:
            return self._pipeline.sum_over_replicas(value)
        if self.plan.holders > 1:
            dist.all_reduce(value, group=self._replicas)
        return value

    def _replicated_grad_norm(self) -> Tensor | None:
        """Returns the norm if DeepSpeed does not keep it, with fp32 weights at ZeRO-0; otherwise returns None.

        In that case every rank holds the whole gradients, and they are already averaged between `backward` and `step`
        of the last micro-batch.
        """
        if self.plan.parallel.zero_stage > 0 or weight_dtype(self.plan.recipe.parallel.precision) != torch.float32:
            return None
        norm = self._gradient_norm()
        scaler = loss_scalers(self.engine).get("gradscaler")
        return norm / scaler.get_scale() if scaler else norm

    def _gradient_norm(self) -> Tensor:
        """Returns the 2-norm of the gradients on this rank and on the other holders of divided weights."""
        held: dict[dist.ProcessGroup | None, list[Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            if counted_by_another_stage(parameter):
                continue
            portion = self._portion(name, parameter)
            # A rank without a gradient still takes part in the sum.
            held.setdefault(portion.holders if portion else None, []).extend(gradients_of([parameter]))
        squares = {group: squared_norm(found, self.device) for group, found in held.items()}
        for group, square in squares.items():
            if group is not None:
                dist.all_reduce(square, group=group)
        total = torch.stack(list(squares.values())).sum()
        if self._pipeline:
            self._pipeline.sum_squares(total)
        return total.sqrt().float()

    def _norm_of_step(self) -> Tensor:
        """Returns the norm within DeepSpeed's step: the one that DeepSpeed has taken, if it keeps one."""
        if (own := self._replicated_grad_norm()) is not None:
            return own
        return torch.as_tensor(last_norm(self.engine.optimizer), device=self.device, dtype=torch.float32)

    @property
    def _replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of the model as this one; None for all ranks."""
        return self._groups.replicas if self._groups else None

    @property
    def _copies(self) -> tuple[int, int]:
        """(index, number) of this rank among the ranks of its replica that hold equal copies of undivided weights."""
        return _place_in(self._copied.copies) if self._copied else (0, 1)

    def _portion(self, name: str, tensor: Tensor) -> Portion | None:
        found = [portion for axis in self.axes if (portion := axis.portion(name, tensor))]
        if len(found) > 1:
            raise ValueError(f"several axes divide {name}")
        return found[0] if found else None

    def _untrained_portion(self, name: str, tensor: Tensor) -> tuple[Region, tuple[int, int]] | None:
        portion = self._portion(name, tensor)
        return None if portion is None else (portion.region, _place_in(portion.replicas))

    def _place(self, name: str, parameter: nn.Parameter) -> Place:
        portion, copy = self._portion(name, parameter), (0, 1)
        if self.plan.parallel.zero_stage == 0:  # ZeRO's shards are not copies of each other
            copy = _place_in(portion.replicas if portion else self._replicas)
        if self._pipeline:
            copy = multiplied(copy, self._pipeline.tied_copy(name))
        if portion is None:
            return self._hugging_face_name(name), Region.whole(shape_of(parameter)), multiplied(copy, self._copies)
        return self._hugging_face_name(name), portion.region, copy

    def _hugging_face_name(self, name: str) -> str:
        for axis in self.axes:
            name = axis.hugging_face_name(name)
        return weight_name(name)

    def _whole(self, parameter: Tensor) -> Tensor:
        """Returns a copy of a whole weight, of which this rank may hold a portion or a ZeRO-3 shard.

        All holders of the weight call it.
        """
        partitioned = self.plan.parallel.zero_stage == 3
        with deepspeed.zero.GatheredParameters([parameter]) if partitioned else nullcontext():
            weight = parameter.detach().clone()
        for axis in self.axes:
            weight = axis.whole(parameter, weight) if isinstance(parameter, nn.Parameter) else weight
        return weight


def _place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns this rank's index in a group, and the group's size; None is the group of all ranks."""
    return dist.get_rank(group), dist.get_world_size(group)
