"""Tensor parallelism by llmtrain's own slices (`llmtrain.models.tensor.split`), at every ZeRO stage.

DeepSpeed is given a grid that describes the groups, as Megatron-LM gives it: it then shards states among the ranks
that hold the same slices, and counts each slice once in the norm.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from torch import Tensor
from torch import distributed as dist

from llmtrain.engines.deepspeed.axis import EngineAxis, WeightShard
from llmtrain.engines.state.save_load import shape_of
from llmtrain.engines.state.shards import WeightSlice
from llmtrain.models import model_configuration
from llmtrain.models.build import find_split
from llmtrain.models.tensor.collectives import Shard, TorchCommunicator, shard_of
from llmtrain.models.tensor.split import TensorParallel


class SlicedAxis(EngineAxis):
    """Holds slices of weights. Its groups are those of DeepSpeed's grid."""

    _grid: Any

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same slices of the same stage."""
        group: dist.ProcessGroup = self._grid.get_data_parallel_group()
        return group

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup:
        """The ranks of a replica, or those that share a stage."""
        group: dist.ProcessGroup = self._grid.get_slice_parallel_group()
        return group

    def weight_shard(self, name: str, tensor: Tensor) -> WeightShard | None:
        """Returns this rank's slice of a weight."""
        split = shard_of(tensor)
        if split is None:
            return None
        group = self.tensor_parallel_group
        weight_slice = slice_of_rank(split, shape_of(tensor), dist.get_rank(group), dist.get_world_size(group))
        return WeightShard(weight_slice, group, self.data_parallel_group)

    def full_tensor(self, parameter: Tensor, shard: Tensor) -> Tensor:
        """Gathers the slices of a weight."""
        split = shard_of(parameter)
        return shard if split is None else split.whole(TorchCommunicator(self.tensor_parallel_group).all_gather(shard))


def slice_of_rank(split: Shard, local: torch.Size, rank: int, ranks: int) -> WeightSlice:
    """Returns a rank's slice of a weight, given the slice's shape `local`."""
    width = local[split.dim] // split.blocks
    shape = (*local[: split.dim], local[split.dim] * ranks, *local[split.dim + 1 :])
    ranges = [((block * ranks + rank) * width, width) for block in range(split.blocks)]
    return WeightSlice.ranges(shape, split.dim, ranges)


class TensorAxis(SlicedAxis):
    """Consecutive ranks that share the layers of one replica."""

    def prepare(self, ds_config: dict[str, Any]) -> None:
        """Makes the groups. Raises FamilyError for a family that computes something else if it is split."""
        recipe, degree = self.plan.recipe, self.plan.parallel.tensor
        self._split = find_split(model_configuration(recipe), recipe, degree, self.plan.megatron_sp_ranks > 1)
        topology = PipeModelDataParallelTopology(num_pp=1, num_mp=degree, num_dp=self.plan.gradient_ranks)
        self._grid = PipelineParallelGrid(topology)

    def sharding(self) -> TensorParallel:
        """Returns this rank's slices."""
        return TensorParallel(self._split, TorchCommunicator(self.tensor_parallel_group))

    @property
    def mpu(self) -> PipelineParallelGrid:
        """The groups, as in a pipeline of one stage."""
        return self._grid
