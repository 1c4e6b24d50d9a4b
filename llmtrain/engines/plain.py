"""A plain PyTorch loop on one device, which Accelerate, Horovod and nn.DataParallel extend to several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines.divergence import estimate_divergence
from llmtrain.engines.engine import Accumulated, ChangeGradients, OwnPasses, Passes, StepResult
from llmtrain.engines.forward import forward, install_kernels, next_logits, objective_of, own_metrics_of, run_model
from llmtrain.engines.guard import Guard, LossAndNorm, check_fused, skip_if
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
from llmtrain.engines.state.optimizer_shards import optimizer_shards
from llmtrain.engines.state.save_load import HasState, Locate, checkpoint_shards, untrained_shards
from llmtrain.engines.state.shards import CheckpointShard, ReplicaIndex, ShardLocation, WeightSlice
from llmtrain.models import OwnMetrics, build_model
from llmtrain.models.adapter import weight_name
from llmtrain.models.nf4 import named_weights
from llmtrain.models.precision import autocast, weight_dtype
from llmtrain.overrides.torch import squared_norm
from llmtrain.plan import Plan
from llmtrain.plan.facts.own_optimizer import TriedOptimizer
from llmtrain.recipe import Recipe


class PlainLoop(HasState):
    """A loop over micro-batches, gradient clipping and `optimizer.step()`.

    An fp32 model is trained as it is, or under autocast. For a model in a lower precision, the loop keeps fp32 master
    weights, as mixed precision training does (arXiv 1710.03740). They start from the rounded weights and accumulate the
    gradients of each micro-batch in fp32. After each step they are rounded into the model's weights.

    A subclass distributes the loop over ranks or devices: it overrides the attributes and the methods up to
    `train_step`, which all ranks call together.
    """

    name = "plain PyTorch"
    is_sharded = False
    """Whether each rank trains shards of the weights, which are DTensors."""
    keeps_masters = True
    """Whether the loop keeps fp32 master weights for a model in a lower precision."""
    replica = ReplicaIndex()
    """This rank's replica of the model; each replica reads different samples."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, tried: TriedOptimizer | None = None) -> None:
        """tried: what is known of an optimizer of the user's own (`Plan.optimizer`)."""
        self.model = model
        self.module: nn.Module = model
        """The module whose forward passes and modes are those of the model."""
        self.recipe = recipe
        self.objective = objective_of(recipe, model.config)
        self.own_metrics = own_metrics_of(recipe)
        self.device = next(model.parameters()).device
        groups = groups_for(recipe.optim, [model], parameter_groups(model, recipe.optim.weight_decay))
        self.masters = {
            weight: nn.Parameter(weight.detach().float())
            for weight in model.parameters()
            if self.keeps_masters and weight.requires_grad and weight.dtype != torch.float32
        }
        for group in groups:
            group["params"] = [self.masters.get(weight, weight) for weight in group["params"]]
        trained = {
            name: self.masters.get(weight, weight) for name, weight in model.named_parameters() if weight.requires_grad
        }
        optim = recipe.optim.with_warmup_steps(recipe.train.steps)
        self.optimizer = self._distribute(
            torch_optimizer(groups, optim, self.is_sharded, recipe.code_dir, tried), trained
        )
        self._round_masters()
        self.scheduler = schedule(self.optimizer, recipe)
        shards = optimizer_shards(self.optimizer, self.masters)
        locate_shards(self.optimizer, self.optimizer, shards, self._locate(), recipe, self.device)
        self.guard = Guard(recipe.guard, self.device)
        check_fused(self.optimizer)

    def _distribute(self, optimizer: Optimizer, trained: dict[str, nn.Parameter]) -> Optimizer:
        """Distributes the model; returns the optimizer that trains this rank's part of it.

        trained: what the optimizer trains, by the name of the weight: the weight or its fp32 master.
        """
        return optimizer

    def _passes(self, is_last: bool) -> AbstractContextManager[object]:
        """Returns the context of a micro-batch's passes; only the last micro-batch has to synchronize gradients."""
        return nullcontext()

    def _losses(self, micro_batch: MicroBatch, metrics: OwnMetrics | None) -> tuple[Tensor, Tensor | None]:
        """Returns the sum of the losses, and the auxiliary loss to be averaged over micro-batches.

        metrics: those of an evaluation, to which the micro-batch is added.
        """
        return forward(self.module, self.model, micro_batch, self.device, self.objective, metrics=metrics)

    def _loss_to_reduce(self, loss_sum: Tensor, num_items: int) -> Tensor:
        """Returns the loss whose gradients, reduced over ranks, are those of the mean over all items.

        This class sums gradients over ranks. num_items: of the global batch.
        """
        return loss_sum / num_items

    def _auxiliary_loss_to_reduce(self, auxiliary: Tensor) -> Tensor:
        """Returns the auxiliary loss whose gradients, reduced over ranks, are those of the mean over the ranks."""
        return auxiliary

    def _complete_gradients(self) -> None:
        """Waits until the gradients are those of all ranks, if the passes do not."""

    def _clip(self, trained: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Clips the gradients; returns their norm before clipping."""
        grad_norm = squared_norm(gradients_of(trained), self.device).sqrt().float()
        nn.utils.clip_grads_with_norm_(trained, limit, grad_norm)
        return grad_norm

    def _reduce_loss_and_norm(self, loss: Tensor, grad_norm: Tensor) -> LossAndNorm:
        """Reduces this rank's part of the mean loss, and the norm of the reduced gradients, over all ranks."""
        return LossAndNorm(loss, grad_norm)

    def _update(self) -> None:
        """Updates the weights."""
        self.optimizer.step()

    def _all_reduce(self, total: Tensor) -> Tensor:
        """Returns the sum of a scalar over all ranks, after forward passes without backward passes."""
        return total

    def _next_logits(self, batch: MicroBatch) -> dict[int, Tensor]:
        return next_logits(self.module, self.model, batch, self.device)

    def _full_tensor(self, weight: Tensor) -> Tensor:
        """Returns a whole weight on the CPU, in the dtype of the forward pass."""
        return weight.cpu()

    def describe(self) -> dict[str, Any]:
        """Returns what distributes the loop, the optimizer's class and the device."""
        return {"engine": self.name, "optimizer": type(self.optimizer).__name__, "device": str(self.device)}

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's replica, which determines the samples that the rank reads."""
        return self.replica.index

    def train_step(self, batch: StepBatch, change_gradients: ChangeGradients | None = None) -> StepResult:
        """Accumulates gradients over micro-batches, clips them, and updates the weights if the guard allows it."""
        if self.objective and self.objective.needs_divergence:
            estimate_divergence(self, [batch])
        return self._update_weights(self._accumulate(batch), change_gradients)

    def own_passes(
        self, batch: StepBatch, change_gradients: ChangeGradients | None = None
    ) -> AbstractContextManager[OwnPasses]:
        """Returns the context of a step whose passes a loop of the user's own makes."""
        return self._own_passes(batch, change_gradients)

    @contextmanager
    def _own_passes(self, batch: StepBatch, change_gradients: ChangeGradients | None) -> Iterator[OwnPasses]:
        self._begin_training()
        passes = OwnPasses(batch, self.device, self._run_model, self._backward, synchronizing=self._passes)
        yield passes
        passes.result = self._update_weights(passes.accumulated(), change_gradients)

    def _update_weights(self, accumulated: Accumulated, change_gradients: ChangeGradients | None) -> StepResult:
        """Takes the norm, clips by it, and updates the weights if the guard allows it."""
        lr = self.learning_rate
        self._complete_gradients()
        if change_gradients:
            change_gradients(named_gradients(self.model, self.masters))
        trained = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        limit = self.recipe.optim.clip_grad_norm or float("inf")
        grad_norm = self._clip(trained, limit)
        measured = self._reduce_loss_and_norm(accumulated.loss, grad_norm)
        skip_if(self.guard.should_skip(measured), self.optimizer)
        self._update()
        self._round_masters()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return StepResult(measured.loss, measured.grad_norm, lr, accumulated.router_loss)

    def _accumulate(self, batch: StepBatch) -> Accumulated:
        """Accumulates the gradients of this rank's micro-batches."""
        self._begin_training()
        if self.objective:
            self.objective.begin()
        passes = Passes(batch, self.device)
        for micro_batch in batch.micro_batches:
            with self._passes(passes.at_last):
                self._backward(passes, *self._forward(micro_batch))
        return passes.accumulated()

    def _begin_training(self) -> None:
        if not self.model.training:  # visiting every module costs as much as a small update
            self.module.train()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        rate: float = self.optimizer.param_groups[0]["lr"]
        return rate

    def _forward(self, micro_batch: MicroBatch, metrics: OwnMetrics | None = None) -> tuple[Tensor, Tensor | None]:
        """Runs `_losses` in the recipe's precision."""
        with autocast(self.recipe.parallel.precision, self.device.type):
            return self._losses(micro_batch, metrics)

    def _run_model(self, batch: MicroBatch, whole: MicroBatch) -> tuple[Any, Tensor | None]:
        """Runs the model itself in the recipe's precision."""
        with autocast(self.recipe.parallel.precision, self.device.type):
            return run_model(self.module, self.model, batch, whole, self.device)

    def _backward(self, passes: Passes, loss_sum: Tensor, auxiliary: Tensor | None) -> None:
        """Accumulates the gradients of a micro-batch; those of master weights in fp32."""
        loss = self._loss_to_reduce(loss_sum, passes.divisor)
        if auxiliary is not None:
            loss = loss + self._auxiliary_loss_to_reduce(auxiliary) / passes.number
        passes.add(loss_sum, auxiliary)
        loss.backward()  # type: ignore[no-untyped-call]
        for weight, master in self.masters.items():
            if weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                weight.grad = None

    @torch.no_grad()
    def eval_step(self, batch: StepBatch) -> Tensor:
        """Returns the mean loss over the items of all ranks."""
        self.module.eval()
        if self.objective:
            self.objective.begin()
        if self.own_metrics:
            self.own_metrics.begin()
        total = torch.zeros((), device=self.device)
        with self.averaged():
            for micro_batch in batch.micro_batches:
                total += self._forward(micro_batch, self.own_metrics)[0]
            return self._all_reduce(total) / batch.divisor

    def next_logits(self, batch: MicroBatch) -> dict[int, Tensor]:
        """Returns the logits of the token after the position with a label, by row."""
        self.module.eval()
        with autocast(self.recipe.parallel.precision, self.device.type):
            return self._next_logits(batch)

    def metric_sums(self) -> Tensor | None:
        """Returns the sums over the last batch, of all ranks: as `Engine.metric_sums`."""
        return None if self.objective is None else self._all_reduce(self.objective.metric_sums(self.device))

    def own_metric_sums(self) -> Tensor:
        """Returns the sums of `own_metrics` over the last batch, of all ranks."""
        assert self.own_metrics is not None
        return self._all_reduce(self.own_metrics.sums(self.device))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every whole weight under its Hugging Face name; tied weights once."""
        with self.averaged():
            for name, parameter in named_weights(self.model):
                yield weight_name(name), self._full_tensor(parameter.detach())

    def averaged(self) -> AbstractContextManager[None]:
        """Returns the context of an evaluation."""
        return averaged_weights(self.optimizer, self.optimizer, self._round_masters)

    def checkpoint_shards(self) -> Iterator[list[CheckpointShard]]:
        """Yields the trained tensors as shards, then the untrained ones."""
        yield from checkpoint_shards(optimizer_shards(self.optimizer, self.masters), self._locate())
        yield untrained_shards(self.model, self.replica, self.recipe.model.omits_base_weights, weight_name)

    def _locate(self) -> Locate:
        """Returns the function that locates what this rank holds of a parameter in the whole weight."""
        names = {parameter: weight_name(name) for name, parameter in self.model.named_parameters()}
        replica = ReplicaIndex() if self.is_sharded else self.replica  # shards are not replicas of each other
        return lambda parameter: ShardLocation(names[parameter], WeightSlice.whole(parameter.shape), replica)

    def progress(self) -> dict[str, Any]:
        """Returns the position of the schedule."""
        return {"schedule": self.scheduler.last_epoch}

    def resumed(self, progress: dict[str, Any]) -> None:
        """Restores the model's weights and the schedule after the shards have been loaded."""
        self._round_masters()
        resume_schedule(self.scheduler, progress["schedule"])

    def close(self) -> None:
        """Does nothing: no hook refers to the loop."""

    @torch.no_grad()
    def _round_masters(self) -> None:
        for weight, master in self.masters.items():
            weight.copy_(master)


def plain_model(plan: Plan, device: torch.device) -> PreTrainedModel:
    """Returns the whole model of a plan, with its kernels and recomputation."""
    recipe = plan.recipe
    model = build_model(recipe, weight_dtype(recipe.parallel.precision), device)
    install_kernels(model, plan)
    return model
