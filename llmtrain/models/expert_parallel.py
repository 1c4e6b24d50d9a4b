"""Expert parallelism: each rank of a group holds an equal part of the experts of every layer.

The model keeps its modules and their names. The parameters of the experts' modules, and their updates, hold the experts
of this rank only, and the modules exchange tokens with the other ranks (`llmtrain.models.experts`). Whatever module
`transformers` computes through its `ExpertsInterface` can be distributed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.errors import FamilyError
from llmtrain.models.experts import ExpertGroups
from llmtrain.models.tensor.collectives import ROW_SHARD
from llmtrain.overrides.transformers import use_experts_function
from llmtrain.plan.facts.built_model import has_fused_experts


def not_distributed(config: PreTrainedConfig, reason: str) -> FamilyError:
    """Returns the refusal of a family whose experts cannot be distributed."""
    return FamilyError("expert.family", "parallel.expert", 1, f"the experts of {config.model_type} stay whole", reason)


def expert_modules(model: nn.Module) -> dict[str, Any]:
    """Returns the modules of a model that hold the experts of a layer, by their names."""
    return {name: module for name, module in model.named_modules() if has_fused_experts(module)}


def expert_parameters(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters with one row for each expert of their module."""
    return frozenset(
        f"{path}.{name}"
        for path, module in expert_modules(model).items()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.shape[0] == module.num_experts
    )


class ExpertParallel:
    """One expert parallel rank: keeps its experts, gathers all, and lets the modules exchange tokens."""

    def __init__(self, names: frozenset[str], groups: ExpertGroups) -> None:
        """names: of the parameters of experts in the whole model (`expert_parameters`)."""
        self._names = names
        self._groups = groups

    def shard(self, name: str, parameter: nn.Parameter) -> None:
        """Replaces a parameter, which may be a meta tensor, by this rank's experts. name: in the whole model."""
        if name in self._names:
            parameter.data = self._own(parameter.data)
            mark_expert(parameter)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's experts of a whole weight."""
        return self._own(whole) if name in self._names else whole

    def install(self, model: PreTrainedModel, names: Mapping[str, str]) -> None:
        """Lets the experts of a sharded model, or of a stage of one, exchange tokens."""
        for module in expert_modules(model).values():
            module.expert_groups = self._groups
            use_experts_function(module)

    def split_adapters(self, model: PreTrainedModel) -> None:
        """Keeps the updates of this rank's experts."""
        for module in expert_modules(model).values():
            for name in getattr(module, "update_scales", {}):
                for side in "AB":
                    parameter = getattr(module, f"lora_{side}_{name}")
                    parameter.data = self._own(parameter.data)
                    mark_expert(parameter)

    @contextmanager
    def whole(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """A context in which parameters have all experts; when it ends, each rank keeps its own."""
        own = [parameter for parameter in dict.fromkeys(parameters) if is_expert(parameter)]
        for parameter in own:
            parameter.data = ROW_SHARD.whole(self._groups.experts.all_gather(parameter.data))
        try:
            yield
        finally:
            for parameter in own:
                parameter.data = self._own(parameter.data)

    def _own(self, whole: Tensor) -> Tensor:
        return ROW_SHARD.part(whole, self._groups.experts.rank, self._groups.experts.size)


def mark_expert(parameter: Any) -> None:
    """Marks a parameter as one of distributed experts."""
    parameter.is_distributed_expert = True


def is_expert(tensor: Tensor) -> bool:
    """Whether a parameter holds distributed experts."""
    return getattr(tensor, "is_distributed_expert", False)
