"""Sequence parallelism (Ulysses, arXiv 2309.14509) × ZeRO 0 to 3 × data parallelism, and every other axis.

Neighbouring ranks read the same samples, each its slice of every sequence. To DeepSpeed they are data parallel ranks:
it averages gradients over them, takes their norm and shards states over them. It gets no sequence groups, which it
would keep for the life of the process.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from llmtrain.data import MicroBatch
from llmtrain.engines.axis import Axis
from llmtrain.engines.sequence_check import check_sequence
from llmtrain.engines.ulysses import Group, Ulysses
from llmtrain.models import model_configuration
from llmtrain.plan import Layout

if TYPE_CHECKING:
    from llmtrain.engines.deepspeed import DeepSpeedEngine


class SequenceAxis(Axis):
    """Slices of sequences. Whatever holds the heads of a layer shares them again while attention runs."""

    def prepare(self, ds_config: dict[str, Any]) -> None:
        """Raises SequenceRefused for a model that computes something else on slices."""
        recipe = self.plan.recipe
        check_sequence(model_configuration(recipe), recipe.model.attention_kernel)

    def attach(self, engine: DeepSpeedEngine) -> None:
        """Shares the attention of the model, or of this rank's stage."""
        self.ulysses = Ulysses(engine.model, sequence_group(self.plan.layout))
        if self.plan.layout.pp > 1:
            # Micro-batches are interleaved, so each forward pass brings the positions that its masks are made from.
            engine.module.stage.register_forward_pre_hook(lambda _, inputs: self.ulysses.receive(inputs[0][1]))

    def active(self) -> AbstractContextManager[None]:
        """Backward passes are within, since activation checkpointing calls attention again."""
        return self.ulysses.active()

    def slice(self, batch: MicroBatch) -> MicroBatch:
        """This rank's slice of each sequence."""
        return self.ulysses.slice(batch)


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
