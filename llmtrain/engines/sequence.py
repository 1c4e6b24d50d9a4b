"""Sequence parallelism (Ulysses) × ZeRO 0 to 3 × data parallelism, and whatever else splits the model."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines.deepspeed import DeepSpeedDataParallel
from llmtrain.engines.documents import documents_known
from llmtrain.engines.expert import DeepSpeedExpertParallel
from llmtrain.engines.expert_tensor import DeepSpeedExpertTensor
from llmtrain.engines.seam import StepResult
from llmtrain.engines.sequence_check import check_sequence
from llmtrain.engines.tensor import DeepSpeedTensorParallel
from llmtrain.engines.ulysses import Group, Ulysses
from llmtrain.models import model_configuration
from llmtrain.plan import Layout, Plan


class DeepSpeedSequence(DeepSpeedDataParallel):
    """Neighbouring ranks read the same samples, each its slice of every sequence.

    To DeepSpeed all ranks are data parallel ones, whatever they read: it averages gradients over them,
    takes their norm and shards states over them. It gets no sequence groups, which it would keep for the
    life of the process.
    """

    def __init__(self, plan: Plan, ds_config: dict[str, Any], device: torch.device) -> None:
        """Raises SequenceRefused for a model that slices would falsify, before it is built."""
        recipe = plan.recipe
        check_sequence(model_configuration(recipe), recipe.model.attention_kernel)
        super().__init__(plan, ds_config, device)
        self.ulysses = Ulysses(self.model, sequence_group(plan.layout))

    @property
    def data_parallel_rank(self) -> int:
        """The ranks of a group are one replica."""
        return super().data_parallel_rank // self.plan.layout.sp

    @property
    def averaged_ranks(self) -> int:
        """Every rank has other tokens."""
        return self.plan.layout.dp * self.plan.layout.sp

    def train_step(self, batch: StepBatch) -> StepResult:
        """As under data parallelism; backward passes are within, since checkpointing calls attention again."""
        with self.ulysses.active():
            return super().train_step(batch)

    def eval_step(self, batch: StepBatch) -> Tensor:
        """Mean cross-entropy over the target tokens of all ranks."""
        with self.ulysses.active():
            return super().eval_step(batch)

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        with documents_known(micro_batch):
            return super()._forward(self.ulysses.slice(micro_batch))


class DeepSpeedTensorSequence(DeepSpeedSequence, DeepSpeedTensorParallel):
    """Tensor parallel ranks hold shards of the heads, among which sequence parallel ones share theirs again."""


class DeepSpeedExpertSequence(DeepSpeedSequence, DeepSpeedExpertParallel):
    """Experts are spread over the ranks of data and sequence parallelism alike: each has tokens of its own."""


class DeepSpeedExpertTensorSequence(DeepSpeedSequence, DeepSpeedExpertTensor):
    """Experts are spread over all ranks; tensor parallel ones share the tokens of a slice among them."""


def sequence_group(layout: Layout) -> Group:
    """The ranks that share this one's samples and hold the same part of the model, `layout.tp` apart."""
    return _strided_group(layout.sp, layout.tp)


@cache
def _strided_group(size: int, stride: int) -> Group:
    """`size` ranks, `stride` apart, among them this one; made once for a process."""
    own = dist.GroupMember.NON_GROUP_MEMBER
    for block in range(0, dist.get_world_size(), size * stride):
        for first in range(block, block + stride):
            ranks = list(range(first, block + size * stride, stride))
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own = group
    return own
