"""Expert parallelism by DeepSpeed's AutoEP: a model's experts are distributed over groups of ranks, at any ZeRO stage.

Each rank reads its own samples. A token is sent to the rank that holds its expert and back; none is dropped
(`deepspeed/module_inject/auto_ep_layer.py`). With tensor parallelism, the ranks of a replica share the heads. In a
block of experts, each of them sends its part of the replica's tokens to the experts, which are distributed over
adjacent ranks of any replica, and gathers the results. DeepSpeed calls this folding
(`deepspeed/moe/ep_tp_dispatch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.engines.axis import Axis, Portion
from llmtrain.engines.expert_names import hugging_face_weights, own_name, region_of_experts
from llmtrain.engines.overrides.deepspeed import count_all_experts, forget_folded_gradients
from llmtrain.engines.state import shape_of

if TYPE_CHECKING:
    from llmtrain.engines.deepspeed import DeepSpeedEngine


class ExpertAxis(Axis):
    """Experts divided among ranks that have tokens of their own."""

    def parameter_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Names each group, because DeepSpeed requires a name to move the experts of a group into one of their own."""
        return [{"name": f"decay {group['weight_decay']}", **group} for group in groups]

    def attach(self, engine: DeepSpeedEngine) -> None:
        """Reads the groups and blocks of experts, which DeepSpeed has made by now."""
        self._engine = engine
        self._group = groups._get_expert_parallel_group(f"ep_size_{self.plan.layout.ep}")
        self._blocks = {
            path: module.model_family
            for path, module in engine.model.named_modules()
            if isinstance(module, AutoEPMoELayer)
        }
        if self.plan.layout.tp > 1:
            count_all_experts(engine.engine.optimizer, self.device)

    def before_backward(self) -> None:
        """Clears the marks that folding left on gradients in the previous micro-batch."""
        if self.plan.layout.tp > 1:
            forget_folded_gradients(self._engine.engine.optimizer, self._engine.model.parameters())

    def portion(self, name: str, tensor: Tensor) -> Portion | None:
        """Returns this rank's experts.

        For experts, the ranks of a tensor parallel group are ordinary ranks and not copies.
        """
        if not is_expert(tensor):
            return None
        region = region_of_experts(name, shape_of(tensor), dist.get_rank(self._group), self.plan.layout.ep)
        return Portion(region, self._group, groups._get_expert_data_parallel_group(tensor.group_name))  # type: ignore[attr-defined]

    def whole(self, parameter: nn.Parameter, own: Tensor) -> Tensor:
        """Gathers the experts of all ranks; returns other weights unchanged."""
        if not is_expert(parameter):
            return own
        parts = [torch.empty_like(own) for _ in range(self.plan.layout.ep)]
        dist.all_gather(parts, own, group=self._group)
        return torch.cat(parts)

    def hugging_face_name(self, name: str) -> str:
        """Returns the name before DeepSpeed replaced the blocks of experts."""
        return own_name(name, self._blocks)

    def named_weights(self, whole: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights with gate and up projections joined."""
        parameters = dict(self._engine.model.named_parameters())
        return hugging_face_weights(parameters, self._blocks, lambda name: whole(parameters[name]))


def is_expert(parameter: Tensor) -> bool:
    """Returns whether DeepSpeed has distributed a parameter, which it marks as one that not all ranks reduce."""
    return not getattr(parameter, "allreduce", True)
