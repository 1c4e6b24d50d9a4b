"""Expert parallelism by DeepSpeed's AutoEP: a model's experts are distributed over groups of ranks, at any ZeRO stage.

Each rank reads its own samples. A token is sent to the rank that holds its expert and back; none is dropped
(`deepspeed/module_inject/auto_ep_layer.py`). With tensor parallelism, the ranks of a replica share the heads. In a
block of experts, each of them sends its part of the replica's tokens to the experts, which are distributed over
adjacent ranks of any replica, and gathers the results. DeepSpeed calls this folding
(`deepspeed/moe/ep_tp_dispatch.py`).

`transformers` keeps the experts of a layer in two tensors, with gate and up projections joined:
`gate_up_proj` [experts, 2·inner, width] and `down_proj` [experts, width, inner]. DeepSpeed has three:
`w1` (gate) and `w3` (up) [experts, inner, width], and `w2` (down) (`deepspeed/moe/ep_repack.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.engines.deepspeed.axis import EngineAxis, WeightShard
from llmtrain.engines.state.save_load import shape_of
from llmtrain.engines.state.shards import Chunk, WeightSlice
from llmtrain.overrides.deepspeed import (
    clear_folding_marks,
    count_all_experts,
    expert_blocks,
    expert_group,
    group_with_experts,
)

GATE, DOWN, UP = "experts.w1", "experts.w2", "experts.w3"


def slice_of_experts(name: str, local: Sequence[int], rank: int, ranks: int) -> WeightSlice:
    """Returns the slice of the Hugging Face block's tensor that a tensor of this rank's experts is.

    local: the shape on this rank, [experts, rows, columns]; each of `ranks` holds the same number of experts.
    """
    experts, rows, columns = local
    first = (rank * experts, rows if name.endswith(UP) else 0, 0)
    height = rows if name.endswith(DOWN) else 2 * rows
    return WeightSlice((ranks * experts, height, columns), (Chunk(first, (experts, rows, columns)),))


def _hugging_face_part(part: str, preset: Any) -> str:
    """Returns the name of a DeepSpeed weight within the Hugging Face block; GATE and UP share the joined weight's.

    preset: the family's, as `expert_blocks` returns it.
    """
    prefixes = {
        GATE: f"{preset.experts_pattern}.{preset.expert_w1}",
        UP: f"{preset.experts_pattern}.{preset.expert_w1}",
        DOWN: f"{preset.experts_pattern}.{preset.expert_w2}",
        "router.gate.": f"{preset.router_pattern}.",
        "router.": f"{preset.router_pattern}.",
        "shared_experts_gate.": f"{preset.shared_experts_gate_pattern}.",
        "shared_experts.": f"{preset.shared_experts_pattern}.",
    }
    prefix, hugging_face_prefix = next(item for item in prefixes.items() if part.startswith(item[0]))
    return hugging_face_prefix + part.removeprefix(prefix)


class ExpertAxis(EngineAxis):
    """Experts divided among ranks that have tokens of their own."""

    def parameter_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Names each group, because DeepSpeed requires a name to move the experts of a group into one of their own."""
        return [{"name": f"decay {group['weight_decay']}", **group} for group in groups]

    def attach(self, engine: DeepSpeedEngine) -> None:
        """Reads what DeepSpeed has made by now: the groups of experts, and the path and preset of each block."""
        self._engine = engine
        self._group = expert_group(self.plan.parallel.expert)
        self._blocks = expert_blocks(engine.module)
        if self.plan.parallel.autotp_ranks > 1:
            count_all_experts(engine.optimizer, self.device)

    def before_backward(self) -> None:
        """Clears the marks that folding left on gradients in the previous micro-batch."""
        if self.plan.parallel.autotp_ranks > 1:
            clear_folding_marks(self._engine.optimizer, self._engine.module.parameters())

    def weight_shard(self, name: str, tensor: Tensor) -> WeightShard | None:
        """Returns this rank's experts.

        For experts, the ranks of a tensor parallel group are ordinary ranks, and hold no replicas.
        """
        if not is_expert(tensor):
            return None
        weight_slice = slice_of_experts(name, shape_of(tensor), dist.get_rank(self._group), self.plan.parallel.expert)
        return WeightShard(weight_slice, self._group, group_with_experts(tensor))

    def full_tensor(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """Gathers the experts of all ranks; returns other weights unchanged."""
        if not is_expert(parameter):
            return shard
        shards = [torch.empty_like(shard) for _ in range(self.plan.parallel.expert)]
        dist.all_gather(shards, shard, group=self._group)
        return torch.cat(shards)

    def hugging_face_name(self, name: str) -> str:
        """Returns the name before DeepSpeed replaced the blocks of experts; gate and up projections share a name."""
        path = self._block_of(name)
        if path is None:
            return name
        part = name.removeprefix(f"{path}.")
        return f"{path}.{_hugging_face_part(part, self._blocks[path])}"

    def named_weights(self, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights with gate and up projections joined and without aliases."""
        parameters = dict(self._engine.module.named_parameters())
        for name, parameter in parameters.items():
            path = self._block_of(name)
            if path is None:
                yield name, whole(parameter)
                continue
            part, preset = name.removeprefix(f"{path}."), self._blocks[path]
            # DeepSpeed also registers the router under the replaced router's name, one level too deep.
            if part == UP or part.startswith(f"{preset.router_pattern}."):
                continue
            weight = whole(parameter)
            if part == GATE:
                weight = torch.cat([weight, whole(parameters[f"{path}.{UP}"])], dim=1)
            yield f"{path}.{_hugging_face_part(part, preset)}", weight

    def _block_of(self, name: str) -> str | None:
        """Returns the path of the block of experts that a weight belongs to."""
        return next((path for path in self._blocks if name.startswith(f"{path}.")), None)


def is_expert(parameter: Tensor) -> bool:
    """Returns whether DeepSpeed has distributed a parameter, which it marks as one that not all ranks reduce."""
    return not getattr(parameter, "allreduce", True)
