"""Horovod's data parallelism: the plain loop on each rank, with gradients summed by Horovod (arXiv 1802.05799)."""

from __future__ import annotations

from typing import Any

import horovod
import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmtrain.engines.guard import LossAndNorm
from llmtrain.engines.plain import PlainLoop, plain_model
from llmtrain.engines.runtime.horovod_ranks import start_horovod
from llmtrain.engines.state.shards import ReplicaIndex
from llmtrain.errors import Problem, RecipeError
from llmtrain.plan import Plan


class Horovod(PlainLoop):
    """A replica on each rank.

    Gradients are summed and not averaged, because each rank's loss is already divided by the target tokens of the
    global batch. They are reduced in fp32, once per step, during the last backward pass. The fp32 master weights of a
    bf16 model are in no autograd graph, so their gradients are reduced after that pass.
    """

    name = f"horovod {horovod.__version__}"

    def __init__(self, plan: Plan, device: torch.device) -> None:
        """Raises RecipeError if Horovod was built without support for the device."""
        start_horovod(plan.cluster.devices_per_node)
        if device.type == "cuda" and not hvd.cuda_built():
            message = "this build of 'horovod' supports CPUs only, not GPUs"
            fix = "HOROVOD_GPU_OPERATIONS=NCCL scripts/install_horovod.sh, where nvcc and NCCL's headers are"
            raise RecipeError(Problem("backend.device", "parallel.backend", message, fix))
        self.replica = ReplicaIndex.of_rank(None)
        self._backend = "nccl" if device.type == "cuda" and hvd.nccl_built() else "gloo"
        self._accumulation = plan.batch.gradient_accumulation_steps
        super().__init__(plain_model(plan, device), plan.recipe, plan.optimizer)

    def _distribute(self, optimizer: Optimizer, trained: dict[str, nn.Parameter]) -> Optimizer:
        """Broadcasts rank 0's weights to all ranks; returns the optimizer wrapped by Horovod."""
        hvd.broadcast_parameters([(name, weight.detach()) for name, weight in trained.items()], root_rank=0)
        wrapped: Any = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=list(trained.items()),
            op=hvd.Sum,
            backward_passes_per_step=self._accumulation,
        )
        self._wrapped = wrapped
        optimizer = wrapped
        return optimizer

    def _auxiliary_loss_to_reduce(self, auxiliary: Tensor) -> Tensor:
        """Divides the auxiliary loss by the number of ranks, because Horovod sums gradients."""
        loss: Tensor = auxiliary / hvd.size()
        return loss

    def _complete_gradients(self) -> None:
        """Waits for the sums."""
        self._wrapped.synchronize()

    def _update(self) -> None:
        """Updates the weights from the gradients that are reduced already."""
        with self._wrapped.skip_synchronize():
            super()._update()

    def _reduce_loss_and_norm(self, loss: Tensor, grad_norm: Tensor) -> LossAndNorm:
        """Sums the loss over all ranks, and averages the norm of the reduced gradients."""
        both = torch.stack([loss.double(), grad_norm.double() / hvd.size()])
        loss, grad_norm = hvd.allreduce(both, op=hvd.Sum, name="measured").float()
        return LossAndNorm(loss, grad_norm)

    def _all_reduce(self, total: Tensor) -> Tensor:
        """Sums over all ranks."""
        summed: Tensor = hvd.allreduce(total, op=hvd.Sum, name="loss")
        return summed

    def describe(self) -> dict[str, Any]:
        """Adds the backend that reduces gradients."""
        return super().describe() | {"backend": self._backend}
