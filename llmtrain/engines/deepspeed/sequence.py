"""Sequence parallelism (Ulysses, arXiv 2309.14509, and rings) × ZeRO 0 to 3 × data parallelism, and every other axis.

Adjacent ranks read the same samples, and each takes its slice of every sequence. To DeepSpeed they are data parallel
ranks: it averages gradients, takes the norm and shards states over them. DeepSpeed is given no sequence groups, because
it would keep them for the life of the process.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import distributed as dist

from llmtrain.data import MicroBatch
from llmtrain.engines.deepspeed.axis import EngineAxis
from llmtrain.engines.deepspeed.ring import Group
from llmtrain.engines.deepspeed.sequence_check import check_sequence
from llmtrain.engines.deepspeed.ulysses import Ulysses
from llmtrain.models import model_configuration


class SequenceAxis(EngineAxis):
    """Slices of sequences. While attention runs, the heads that a rank holds are divided among the sequence ranks."""

    def prepare(self, ds_config: dict[str, Any]) -> None:
        """Raises FamilyError for a model that computes something else on slices."""
        recipe = self.plan.recipe
        degrees = self.plan.head_ranks, self.plan.sequence_ring
        check_sequence(model_configuration(recipe), recipe.model.attention_kernel, *degrees)

    def attach(self, engine: DeepSpeedEngine) -> None:
        """Divides the attention of the model, or of this rank's stage, among the ranks of a sequence group."""
        model = engine.module.stages[0].model if self.plan.stages else engine.module
        head_ranks, ring, tensor = self.plan.head_ranks, self.plan.sequence_ring, self.plan.parallel.tensor
        # Ranks that divide heads are next to each other: they wait for what they send, and those of a ring do not.
        heads = _strided_group(head_ranks, tensor) if ring > 1 and head_ranks > 1 else None
        of_ring = _strided_group(ring, tensor * head_ranks) if ring > 1 else None
        self.ulysses = Ulysses(model, self.sequence_parallel_group, heads, of_ring)
        if self.plan.stages:
            # Micro-batches are interleaved, so each forward pass provides the positions for its own masks.
            for stage in engine.module.stages:
                stage.register_forward_pre_hook(lambda _, inputs: self.ulysses.receive(inputs[0][1]))

    def active(self) -> AbstractContextManager[None]:
        """Returns the context of both passes; with activation checkpointing the backward pass calls attention again."""
        return self.ulysses.active()

    @property
    def sequence_parallel_group(self) -> Group:
        """The ranks with this rank's samples and the same part of the model; they are `parallel.tensor` apart."""
        return _strided_group(self.plan.parallel.sequence, self.plan.parallel.tensor)

    def slice(self, batch: MicroBatch) -> MicroBatch:
        """Returns this rank's slice of each sequence."""
        return self.ulysses.slice(batch)


@cache
def _strided_group(size: int, stride: int) -> Group:
    """Returns the group of `size` ranks, `stride` apart, that contains this rank; made once per process."""
    group_of_rank = dist.GroupMember.NON_GROUP_MEMBER
    for block in range(0, dist.get_world_size(), size * stride):
        for first in range(block, block + stride):
            ranks = list(range(first, block + size * stride, stride))
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                group_of_rank = group
    return group_of_rank
