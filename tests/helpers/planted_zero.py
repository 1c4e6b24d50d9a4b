"""Typical bugs of ZeRO, planted into DeepSpeed's optimizers: in partitioning, reducing and gathering."""

from __future__ import annotations

from itertools import count

import torch
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import distributed as dist

from llmtrain.engines.deepspeed import engine
from tests.helpers.small_verify import STEPS


def clipping_per_partition(patch):
    """Each rank clips its partition by the partition's own norm; the reported norm is right."""
    original = DeepSpeedZeroOptimizer.unscale_and_clip_grads

    def clip(self, grads, total_norm):
        original(self, grads, torch.linalg.vector_norm(grads[0]))

    patch.setattr(DeepSpeedZeroOptimizer, "unscale_and_clip_grads", clip)


def dropped_group(patch):
    """The second group, norms and biases, is never updated."""
    original = DeepSpeedZeroOptimizer._optimizer_step

    def step(self, group):
        if group == 0:
            original(self, group)

    patch.setattr(DeepSpeedZeroOptimizer, "_optimizer_step", step)


def gradients_of_one_rank_lost(patch):
    """The last rank's loss is counted, but its gradients are not."""
    original = engine.forward

    def forward(*arguments):
        loss_sum, auxiliary = original(*arguments)
        lost = dist.get_rank() == dist.get_world_size() - 1
        return (loss_sum.detach() + 0 * loss_sum if lost else loss_sum), auxiliary

    patch.setattr(engine, "forward", forward)


def partition_not_reduced(patch):
    """The last rank continues with its own gradients."""
    original = DeepSpeedZeroOptimizer.average_tensor

    def average(self, tensor, dtype):
        own = tensor / dist.get_world_size()
        original(self, tensor, dtype)
        if dist.get_rank() == dist.get_world_size() - 1:
            tensor.copy_(own)

    patch.setattr(DeepSpeedZeroOptimizer, "average_tensor", average)


def gather_forgotten_once(patch):
    """After the second step, the ranks keep old weights of other ranks; the next gather corrects this."""
    original, calls = stage_1_and_2.all_gather_dp_groups, count()

    def gather(*arguments, **more):
        if next(calls) % STEPS != 1:
            original(*arguments, **more)

    patch.setattr(stage_1_and_2, "all_gather_dp_groups", gather)


def clipping_per_shard(patch):
    original = DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads

    def clip(self, group, total_norm):
        original(self, group, torch.linalg.vector_norm(self.fp32_partitioned_groups_flat[group].grad))

    patch.setattr(DeepSpeedZeroOptimizer_Stage3, "unscale_and_clip_grads", clip)


def stale_gather(patch):
    """The weights that are gathered after the second step are those from before it."""
    original, calls = DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters, count()

    def reassign(self, group):
        step = next(calls) // len(self.fp16_groups) % STEPS
        if step != 1:
            original(self, group)

    patch.setattr(DeepSpeedZeroOptimizer_Stage3, "_reassign_or_swap_out_partitioned_parameters", reassign)


def dropped_shard(patch):
    """The last rank reverts the update of its partition."""
    original = DeepSpeedZeroOptimizer_Stage3._optimizer_step

    def step(self, group):
        flat = self.fp32_partitioned_groups_flat[group].data
        before = flat.clone()
        original(self, group)
        if dist.get_rank() == dist.get_world_size() - 1:
            flat.copy_(before)

    patch.setattr(DeepSpeedZeroOptimizer_Stage3, "_optimizer_step", step)


PARTITIONED = (
    clipping_per_partition,
    dropped_group,
    gradients_of_one_rank_lost,
    partition_not_reduced,
    gather_forgotten_once,
)
"""At ZeRO-1 and 2."""
SHARDED = (clipping_per_shard, gradients_of_one_rank_lost, stale_gather, dropped_shard)
"""At ZeRO-3."""
