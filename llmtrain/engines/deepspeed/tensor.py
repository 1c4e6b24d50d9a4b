"""Tensor parallelism by llmtrain's own slices (`llmtrain.models.tensor.split`), at every ZeRO stage.

DeepSpeed is given a grid that describes the groups, as Megatron-LM gives it: it then shards states among the ranks
that hold the same slices, and counts each slice once in the norm.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from llmtrain.engines.deepspeed.axis import EngineAxis, Portion
from llmtrain.engines.deepspeed.partitioned import gather_partitioned, partition_with
from llmtrain.engines.state.pieces import Region
from llmtrain.engines.state.save_load import shape_of
from llmtrain.models import build_sliced, model_configuration
from llmtrain.models.precision import weight_dtype
from llmtrain.models.proof.slices_check import check_slices
from llmtrain.models.tensor.exchanges import GroupRanks, Shard, shard_of
from llmtrain.models.tensor.split import TensorParallel


class SlicedAxis(EngineAxis):
    """Holds slices of weights. Its groups are those of DeepSpeed's grid."""

    _grid: Any

    @property
    def replicas(self) -> dist.ProcessGroup:
        """The ranks that hold the same slices of the same stage."""
        group: dist.ProcessGroup = self._grid.get_data_parallel_group()
        return group

    @property
    def copies(self) -> dist.ProcessGroup:
        """The ranks of a replica, or those that share a stage."""
        group: dist.ProcessGroup = self._grid.get_slice_parallel_group()
        return group

    def portion(self, name: str, tensor: Tensor) -> Portion | None:
        """Returns this rank's slice of a weight."""
        shard = shard_of(tensor)
        if shard is None:
            return None
        rank, ranks = dist.get_rank(self.copies), dist.get_world_size(self.copies)
        return Portion(region_of(shard, shape_of(tensor), rank, ranks), self.copies, self.replicas)

    def whole(self, parameter: nn.Parameter, own: Tensor) -> Tensor:
        """Joins the slices."""
        shard = shard_of(parameter)
        return own if shard is None else shard.whole(GroupRanks(self.copies).gather(own))


def region_of(shard: Shard, local: torch.Size, rank: int, ranks: int) -> Region:
    """Returns the location of a rank's slice of shape `local` in the whole weight."""
    width = local[shard.dim] // shard.blocks
    shape = (*local[: shard.dim], local[shard.dim] * ranks, *local[shard.dim + 1 :])
    return Region.ranges(shape, shard.dim, [((block * ranks + rank) * width, width) for block in range(shard.blocks)])


class TensorAxis(SlicedAxis):
    """Consecutive ranks that share the layers of one replica."""

    def prepare(self, ds_config: dict[str, Any]) -> None:
        """Makes the groups. Raises FamilyError for a family that computes something else if it is split."""
        recipe, degree = self.plan.recipe, self.plan.parallel.tensor
        config, regions = model_configuration(recipe), self.plan.megatron_sp_ranks > 1
        self._split = check_slices(config, degree, recipe.model.attention_kernel, regions)
        topology = PipeModelDataParallelTopology(num_pp=1, num_mp=degree, num_dp=self.plan.gradient_ranks)
        self._grid = PipelineParallelGrid(topology)

    def build(self, ds_config: dict[str, Any]) -> PreTrainedModel:
        """Returns the model with this rank's slices. Those of a layer are allocated, then partitioned at ZeRO-3."""
        recipe = self.plan.recipe
        slices = TensorParallel(self._split, GroupRanks(self.copies))
        dtype = weight_dtype(recipe.parallel.precision)
        if self.plan.parallel.zero_stage < 3:
            return build_sliced(recipe, dtype, self.device, slices)
        partition = partition_with(ds_config, self.replicas, self.grid)
        is_reader = dist.get_rank(self.replicas) == 0
        return build_sliced(recipe, dtype, self.device, slices, partition, gather_partitioned, is_reader)

    @property
    def grid(self) -> PipelineParallelGrid:
        """The groups, as in a pipeline of one stage."""
        return self._grid
