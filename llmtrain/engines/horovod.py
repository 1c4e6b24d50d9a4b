"""Horovod's data parallelism: the plain loop on each rank, with gradients summed by Horovod (arXiv 1802.05799)."""

from __future__ import annotations

from typing import Any

import horovod
import horovod.torch as hvd
import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer

from llmtrain.data import MicroBatch
from llmtrain.engines.forward import install_kernels
from llmtrain.engines.guard import Measured
from llmtrain.engines.plain import PlainLoop
from llmtrain.errors import Problem, RecipeError
from llmtrain.models import build_model
from llmtrain.models.precision import weight_dtype
from llmtrain.plan import Plan
from llmtrain.runtime.horovod_ranks import join


class HorovodDataParallel(PlainLoop):
    """A replica on each rank.

    Gradients are summed and not averaged, because each rank's loss is already divided by the target tokens of the
    global batch. They are reduced in fp32, once per step, during the last backward pass. The fp32 master weights of a
    bf16 model are in no autograd graph, so their gradients are reduced after that pass.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        join(plan.cluster.devices_per_node)
        _check_device(device)
        self.accumulation = plan.batch.gradient_accumulation_steps
        recipe = plan.recipe
        model = build_model(recipe, weight_dtype(recipe.parallel.precision), device)
        if recipe.parallel.activation_checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        install_kernels(model, plan)
        super().__init__(model, recipe)

    @property
    def data_parallel_rank(self) -> int:
        """Rank of this process; every rank is a replica."""
        return dist.get_rank()

    def describe(self) -> dict[str, Any]:
        """Returns Horovod's version, the reduction backend, the optimizer and the device."""
        backend = "nccl" if self.device.type == "cuda" and hvd.nccl_built() else "gloo"
        return super().describe() | {"engine": f"horovod {horovod.__version__}", "backend": backend}

    def _optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Returns the recipe's optimizer, wrapped by Horovod, after broadcasting rank 0's weights to all ranks."""
        trained = [
            (name, self.masters.get(weight, weight))
            for name, weight in self.model.named_parameters()
            if weight.requires_grad
        ]
        hvd.broadcast_parameters([(name, weight.detach()) for name, weight in trained], root_rank=0)
        self._round_masters()
        wrapped: Optimizer = hvd.DistributedOptimizer(
            super()._optimizer(groups),
            named_parameters=trained,
            op=hvd.Sum,
            backward_passes_per_step=self.accumulation,
        )
        return wrapped

    @property
    def _copy(self) -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Runs the plain loop's forward pass; averages the auxiliary loss over the ranks' micro-batches as well."""
        loss_sum, auxiliary = super()._forward(micro_batch)
        return loss_sum, None if auxiliary is None else auxiliary / hvd.size()

    def _reduce_gradients(self) -> None:
        """Waits for the sums, before the gradients are clipped."""
        self.optimizer.synchronize()  # type: ignore[attr-defined]

    def _update(self) -> None:
        with self.optimizer.skip_synchronize():  # type: ignore[attr-defined]
            super()._update()

    def measure(self, loss: Tensor, grad_norm: Tensor) -> Measured:
        """Sums this rank's share of the loss over all ranks, and averages the norm of the reduced gradients."""
        both = torch.stack([loss.double(), grad_norm.double() / hvd.size()])
        loss, grad_norm = hvd.allreduce(both, op=hvd.Sum, name="measured").float()
        return Measured(loss, grad_norm)

    def _over_ranks(self, total: Tensor) -> Tensor:
        summed: Tensor = hvd.allreduce(total, op=hvd.Sum, name="loss")
        return summed


def _check_device(device: torch.device) -> None:
    """Raises RecipeError if Horovod was built without support for the device."""
    if device.type == "cuda" and not hvd.cuda_built():
        message = "'horovod' was given on a GPU, but this Horovod was built for CPUs"
        fix = "HOROVOD_GPU_OPERATIONS=NCCL scripts/install_horovod.sh, where nvcc and NCCL's headers are"
        raise RecipeError(Problem("backend.device", "parallel.backend", message, fix))
