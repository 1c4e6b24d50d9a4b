"""Expert parallelism: the experts of each layer are distributed over groups of ranks, at any ZeRO stage.

Each rank reads its own samples, and tokens are sent to the ranks that hold their experts and back
(`llmtrain.models.experts`). Adjacent ranks of a stage share the experts, whichever replica and tensor group they belong
to. DeepSpeed is told which parameters are experts, and which ranks hold the same ones: it reduces their gradients, and
shards their states, over these ranks only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.engines.deepspeed.axis import EngineAxis, WeightShard
from llmtrain.engines.deepspeed.tensor import slice_of_rank
from llmtrain.engines.state.save_load import shape_of
from llmtrain.models import build, model_configuration
from llmtrain.models.expert_parallel import ExpertParallel, expert_modules, expert_parameters, is_expert
from llmtrain.models.experts import ExpertGroups
from llmtrain.models.hub_names import empty_model
from llmtrain.models.tensor.collectives import ROW_SHARD, TorchCommunicator
from llmtrain.overrides.deepspeed import partition_over, register_expert_groups


class DeepSpeedExperts(MoE):  # type: ignore[misc]
    """What a module of distributed experts inherits, so that DeepSpeed's ZeRO 0 to 2 look for experts."""

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Makes no groups: `ExpertAxis` has made them."""


class ExpertAxis(EngineAxis):
    """Experts divided among ranks that have tokens of their own."""

    def prepare(self, ds_config: dict[str, Any]) -> None:
        """Makes the groups. Raises FamilyError for a family that computes something else with distributed experts."""
        recipe, parallel = self.plan.recipe, self.plan.parallel
        config = model_configuration(recipe)
        if parallel.tensor == 1 and not self.plan.stages:  # otherwise those axes check it with their own split
            build.find_split(config, recipe, 1)
        self._group, self._replicas = _groups(parallel.expert, dist.get_world_size() // parallel.pipeline)
        self._name = register_expert_groups(parallel.expert, self._group, self._replicas)
        self._tensor = _adjacent(parallel.tensor)
        self._parameters = expert_parameters(empty_model(config, torch.float32, recipe.model.trust_remote_code))

    def sharding(self) -> ExpertParallel:
        """Returns this rank's experts."""
        groups = ExpertGroups(TorchCommunicator(self._group), TorchCommunicator(self._tensor))
        return ExpertParallel(self._parameters, groups)

    def place(self, module: nn.Module) -> None:
        """Tells DeepSpeed which parameters are experts, and which ranks hold the same ones."""
        for experts in expert_modules(module).values():
            own: list[Any] = [parameter for parameter in experts.parameters(recurse=False) if is_expert(parameter)]
            for parameter in own:
                parameter.allreduce, parameter.group_name = False, self._name
                parameter.model_parallel = True  # each rank's experts count in the norm, as in `TensorParallel.install`
                partition_over(parameter, self._replicas, self._name)
            kind = type(experts)
            looks = self.plan.parallel.zero_stage < 3 and any(parameter.requires_grad for parameter in own)
            if looks and not issubclass(kind, DeepSpeedExperts):
                experts.__class__ = type(kind.__name__, (kind, DeepSpeedExperts), {})

    def parameter_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Moves experts to groups of their own, which DeepSpeed knows by the name of their ranks.

        DeepSpeed would cut large groups, so that the stages of a pipeline might have different numbers of them.
        """
        dense = [group | {"params": [one for one in group["params"] if not is_expert(one)]} for group in groups]
        experts = [
            group | {"params": [one for one in group["params"] if is_expert(one)], "moe": True, "name": self._name}
            for group in groups
        ]
        return [group for group in dense + experts if group["params"]]

    @property
    def expert_replica_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same experts."""
        return self._replicas

    def weight_shard(self, name: str, tensor: Tensor) -> WeightShard | None:
        """Returns this rank's experts."""
        if not is_expert(tensor):
            return None
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        return WeightShard(slice_of_rank(ROW_SHARD, shape_of(tensor), rank, ranks), self._group, self._replicas)

    def full_tensor(self, parameter: Tensor, shard: Tensor) -> Tensor:
        """Gathers the experts of all ranks; returns other weights unchanged."""
        return ROW_SHARD.whole(TorchCommunicator(self._group).all_gather(shard)) if is_expert(parameter) else shard


@cache
def _groups(degree: int, ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Returns the ranks that share the experts of this rank's stage, and those that hold the same ones.

    ranks: of a stage. Made once per process.
    """
    found: list[Any] = [None, None]
    for first in range(0, dist.get_world_size(), ranks):
        sharing = [range(start, start + degree) for start in range(first, first + ranks, degree)]
        equal = [range(start, first + ranks, degree) for start in range(first, first + degree)]
        for index, members in ((0, sharing), (1, equal)):
            for member in members:
                group = dist.new_group(list(member))
                if dist.get_rank() in member:
                    found[index] = group
    return found[0], found[1]


@cache
def _adjacent(size: int) -> dist.ProcessGroup:
    """Returns the group of `size` adjacent ranks that contains this rank; made once per process."""
    found: Any = None
    for first in range(0, dist.get_world_size(), size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= dist.get_rank() < first + size:
            found = group
    return found  # type: ignore[no-any-return]
