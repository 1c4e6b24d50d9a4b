"""The gradient's norm under ZeRO and the loss of a step, summed over ranks by one collective."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch import distributed as dist

from llmtrain.engines.norm import squared_norm
from llmtrain.plan import Layout


class NormWithLoss:
    """Takes the place of DeepSpeed's norm.

    DeepSpeed 0.19.8 sums over the ranks once for each group of parameters, and reads each gradient twice, once to make
    a copy of it in fp64. The loss would be one sum more, for which all ranks wait before the update.
    """

    def __init__(self, optimizer: DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3) -> None:
        self._optimizer = optimizer
        self.share: Callable[[], Tensor] = partial(torch.zeros, ())
        """This rank's share of the loss, to be set before the update."""
        self._loss: Tensor | None = None
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            optimizer.scaled_global_norm = self._take
        else:
            optimizer._get_norm_groups = lambda: [self._take()]

    @classmethod
    def of(cls, optimizer: Any, layout: Layout) -> NormWithLoss | None:
        """None where DeepSpeed's norm stays: for gradients on the host, or in which not every rank shares."""
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            on_host = optimizer.cpu_offload
        elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            on_host = optimizer.offload_optimizer
        else:
            return None
        return None if on_host or max(layout.tp, layout.ep, layout.pp) > 1 else cls(optimizer)

    def take_loss(self) -> Tensor | None:
        """Of all ranks, once in a step; None where DeepSpeed has dropped the step before it took a norm."""
        loss, self._loss = self._loss, None
        return loss

    def _take(self) -> Tensor:
        """The norm, with the loss scale in it; −1 where it is not finite."""
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
