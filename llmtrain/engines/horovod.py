"""Horovod's data parallelism: the plain loop on each rank, with gradients summed by Horovod (arXiv 1802.05799)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod
import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from transformers import PreTrainedModel

from llmtrain.engines.guard import Measured
from llmtrain.engines.plain import Distribution
from llmtrain.engines.runtime.horovod_ranks import start_horovod
from llmtrain.errors import Problem, RecipeError
from llmtrain.plan import Plan


class Horovod(Distribution):
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
        self.place = dist.get_rank(), dist.get_world_size()
        self._backend = "nccl" if device.type == "cuda" and hvd.nccl_built() else "gloo"
        self._accumulation = plan.batch.gradient_accumulation_steps

    def distribute(self, model: PreTrainedModel, optimizer: Optimizer, trained: dict[str, nn.Parameter]) -> Optimizer:
        """Broadcasts rank 0's weights to all ranks; returns the optimizer wrapped by Horovod."""
        super().distribute(model, optimizer, trained)
        hvd.broadcast_parameters([(name, weight.detach()) for name, weight in trained.items()], root_rank=0)
        self._optimizer: Any = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=list(trained.items()),
            op=hvd.Sum,
            backward_passes_per_step=self._accumulation,
        )
        wrapped: Optimizer = self._optimizer
        return wrapped

    def weigh_auxiliary(self, auxiliary: Tensor) -> Tensor:
        """Returns this rank's share of the mean: Horovod sums gradients."""
        share: Tensor = auxiliary / hvd.size()
        return share

    def clip(self, trained: Sequence[nn.Parameter], limit: float, device: torch.device) -> Tensor:
        """Waits for the sums before it clips the gradients."""
        self._optimizer.synchronize()
        return super().clip(trained, limit, device)

    def step(self, optimizer: Optimizer) -> None:
        """Updates the weights from the gradients that are reduced already."""
        with self._optimizer.skip_synchronize():
            optimizer.step()

    def measure(self, loss: Tensor, grad_norm: Tensor) -> Measured:
        """Sums this rank's share of the loss over all ranks, and averages the norm of the reduced gradients."""
        both = torch.stack([loss.double(), grad_norm.double() / hvd.size()])
        loss, grad_norm = hvd.allreduce(both, op=hvd.Sum, name="measured").float()
        return Measured(loss, grad_norm)

    def sum(self, total: Tensor) -> Tensor:
        """Sums over all ranks."""
        summed: Tensor = hvd.allreduce(total, op=hvd.Sum, name="loss")
        return summed

    def describe(self) -> dict[str, Any]:
        """Adds the backend that reduces gradients."""
        return super().describe() | {"backend": self._backend}
