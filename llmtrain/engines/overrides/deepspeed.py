"""What llmtrain replaces in DeepSpeed 0.19.8, and why. `llmtrain.engines.overrides` has the list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from deepspeed.module_inject import set_autotp_mode
from deepspeed.module_inject.auto_ep_folding import clear_autoep_folding_gradient_corrected
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.engines.optim import squared_norm
from llmtrain.recipe import ParallelConfig, Precision


def forget_groups() -> None:
    """Lets the next engine of this process make its own groups.

    DeepSpeed 0.19.8 uses the groups of the first tensor parallel engine for every later one, whatever its degree, and
    also for engines without tensor parallelism. After a pipeline, the next engine would join the pipeline's groups.
    """
    set_autotp_mode(training=False)
    groups.mpu = None
    groups.mesh_device = None
    groups._TENSOR_MODEL_PARALLEL_GROUP = None
    groups._MODEL_PARALLEL_GROUP = None
    groups._DATA_PARALLEL_GROUP = None


def make_tensor_groups(degree: int) -> None:
    """Makes the tensor and data parallel groups.

    Ranks i·degree to (i+1)·degree - 1 share one replica; ranks that are equal modulo `degree` hold the same shards.
    """
    forget_groups()
    groups._init_tp_mesh_device(tensor_model_parallel_size=degree)


def tensor_group() -> dist.ProcessGroup:
    """Returns the ranks that hold one replica together with this one."""
    return cast(dist.ProcessGroup, groups.get_tensor_model_parallel_group())


def data_group() -> dist.ProcessGroup:
    """Returns the ranks that hold the same shards as this one."""
    return cast(dist.ProcessGroup, groups.get_data_parallel_group())


def reduce_among_several(engine: DeepSpeedEngine) -> None:
    """Leaves gradients in place in a group of one rank.

    DeepSpeed 0.19.8 copies all of them into a buffer and back, which takes time and doubles their memory. A group of
    one rank still runs DeepSpeed's function if it has to divide by more ranks, as for experts that only one rank holds.
    """
    own = engine.allreduce_no_retain

    def reduce(bucket: list[Tensor], dp_group: dist.ProcessGroup, **options: Any) -> None:
        if dist.get_world_size(dp_group) > 1 or options.get("dp_world_size") != 1:
            own(bucket, dp_group, **options)

    engine.allreduce_no_retain = reduce


class NormWithLoss:
    """Replaces DeepSpeed's norm by one that is reduced together with the loss.

    DeepSpeed 0.19.8 sums over the ranks once for each group of parameters, and reads each gradient twice, once to copy
    it to fp64. The loss would need one more reduction, for which all ranks would wait before the update.
    """

    def __init__(self, optimizer: DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3) -> None:
        self._optimizer = optimizer
        self.share: Callable[[], Tensor] = partial(torch.zeros, ())
        """Returns this rank's share of the loss; set before the update."""
        self._loss: Tensor | None = None
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            optimizer.scaled_global_norm = self._take
        else:
            optimizer._get_norm_groups = lambda: [self._take()]

    @classmethod
    def of(cls, optimizer: Any, parallel: ParallelConfig) -> NormWithLoss | None:
        """Returns None to keep DeepSpeed's norm, for gradients on the host or in which not every rank has a share."""
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            on_host = optimizer.cpu_offload
        elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            on_host = optimizer.offload_optimizer
        else:
            return None
        return None if on_host or max(parallel.tensor, parallel.expert, parallel.pipeline) > 1 else cls(optimizer)

    def take_loss(self) -> Tensor | None:
        """Returns the loss of all ranks, once per step; None if DeepSpeed dropped the step before it took a norm."""
        loss, self._loss = self._loss, None
        return loss

    def _take(self) -> Tensor:
        """Returns the norm, which includes the loss scale; −1 if it is not finite."""
        parts = [part for group in self._optimizer.averaged_gradients.values() for part in group]
        own = [part for part in parts if not getattr(part, "_zero_padding", False)]
        share = self.share()
        sums = torch.stack([squared_norm(own, share.device), share.double()])
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        self._loss = sums[1].float()
        norm = sums[0].sqrt().float()
        mask_nan_or_inf_with_val_inplace(norm, device=norm.device)
        return norm


@contextmanager
def no_host_checks(precision: Precision) -> Iterator[None]:
    """Prevents DeepSpeed from waiting for the gradient norm to check whether it is finite, or has to be clipped.

    DeepSpeed would drop a step whose norm is not finite, without stepping the schedule. With fp16 the check is
    necessary, because DeepSpeed finds its loss scale by it.
    """
    if precision == "fp16":
        yield
        return
    replaced: list[tuple[Any, str, Any]] = [
        (bf16_optimizer, "is_invalid_grad_norm", _not_asked),
        (stage_1_and_2, "is_invalid_grad_norm", _not_asked),
        (stage3, "is_invalid_grad_norm", _not_asked),
        (bf16_optimizer, "clip_tensors_by_global_norm", _clip),
    ]
    own = [getattr(module, name) for module, name, _ in replaced]
    for module, name, replacement in replaced:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for (module, name, _), function in zip(replaced, own, strict=True):
            setattr(module, name, function)


def _not_asked(norm: object) -> bool:
    """Returns False, because the guard's verdict is on the device already."""
    return False


def _clip(input_tensors: Iterable[Tensor], max_norm: float, global_norm: Tensor | float, mpu: object = None) -> None:
    """Clips as DeepSpeed does, but multiplies by 1 if no clipping is necessary, which needs no check on the host."""
    factor = max_norm / (global_norm + 1e-6)
    factor = factor.clamp(max=1.0) if isinstance(factor, Tensor) else min(factor, 1.0)
    for tensor in input_tensors:
        tensor.detach().mul_(factor)


def count_all_experts(optimizer: Any, device: torch.device) -> None:
    """Makes ZeRO 1 and 2 count the experts of all ranks in the norm, under AutoEP folded with AutoTP.

    DeepSpeed 0.19.8 counts only those of the first rank of each tensor parallel group, although each rank has gradients
    of experts that no other rank has.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return

    def count(norms: list[Tensor]) -> None:
        for index, has_experts in enumerate(optimizer.is_moe_param_group):
            if has_experts:
                square = squared_norm(optimizer.averaged_gradients[index], device)
                dist.all_reduce(square)
                norms[index] = square.sqrt().float()

    optimizer._average_expert_grad_norms = count


def forget_folded_gradients(optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Clears marks that DeepSpeed's folding leaves on parameters, before each backward pass.

    Folding scales gradients of experts and adds up those of routers in each micro-batch, and marks them as done.
    `BF16_Optimizer` does not clear the marks before the next micro-batch, whose gradients would remain uncorrected.
    """
    if isinstance(optimizer, BF16_Optimizer):
        for parameter in parameters:
            clear_autoep_folding_gradient_corrected(parameter)
