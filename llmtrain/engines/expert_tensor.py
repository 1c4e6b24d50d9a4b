"""Experts and slices of attention over the same ranks (DeepSpeed's "folding" of AutoEP and AutoTP).

The ranks of a tensor parallel group share the heads of a replica. In a block of experts each of them sends
its part of the replica's tokens to the experts, which are spread over neighbouring ranks of any replica,
and gathers the results again (`deepspeed/moe/ep_tp_dispatch.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.module_inject.auto_ep_folding import clear_autoep_folding_gradient_corrected
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.engines.expert import DeepSpeedExpertParallel, is_expert
from llmtrain.engines.norm import squared_norm
from llmtrain.engines.tensor import DeepSpeedTensorParallel
from llmtrain.plan import Plan


class DeepSpeedExpertTensor(DeepSpeedTensorParallel, DeepSpeedExpertParallel):
    """Tensor parallel ranks share attention, and all ranks the experts; what is neither lies on each of them."""

    def __init__(self, plan: Plan, ds_config: dict[str, Any], device: torch.device) -> None:
        super().__init__(plan, ds_config, device)
        if isinstance(self.engine.optimizer, DeepSpeedZeroOptimizer):
            # DeepSpeed would count the experts of the first rank of each tensor parallel group only.
            self.engine.optimizer._average_expert_grad_norms = self._count_all_experts

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        if isinstance(self.engine.optimizer, BF16_Optimizer):
            # DeepSpeed scales gradients of experts and adds up those of routers, micro-batch by micro-batch, and marks
            # them as done. Nothing takes the mark off before the next one, which would be left as it is.
            for parameter in self.model.parameters():
                clear_autoep_folding_gradient_corrected(parameter)
        super()._backward(loss, is_last)

    def _copy(self, parameter: nn.Parameter) -> tuple[int, int]:
        # Of experts the ranks of a tensor parallel group have no copies: they are ranks like any other.
        return DeepSpeedExpertParallel._copy(self, parameter) if is_expert(parameter) else super()._copy(parameter)

    def _count_all_experts(self, norms: list[Tensor]) -> None:
        """Replaces the norm of each group of experts: each rank holds gradients that no other has."""
        optimizer = self.engine.optimizer
        for index, has_experts in enumerate(optimizer.is_moe_param_group):
            if has_experts:
                square = squared_norm(optimizer.averaged_gradients[index], self.device)
                dist.all_reduce(square)
                norms[index] = square.sqrt().float()
