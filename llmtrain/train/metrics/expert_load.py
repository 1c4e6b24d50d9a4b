"""How evenly the routers of a mixture of experts use its experts.

No engine here drops a token, so an uneven load costs time: under expert parallelism, all ranks wait for the one whose
experts get the most tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.engines.engine import Engine
from llmtrain.engines.runtime.agree import all_reduce_sum
from llmtrain.models.expert_parallel import expert_modules
from llmtrain.plan import Plan


class ExpertLoad:
    """Counts the tokens that training sends to each expert of each layer. All ranks call every method."""

    def __init__(self, model: nn.Module) -> None:
        """model: that of an engine, or the stages of a rank. Only experts that `transformers` computes in one call for
        all experts of a layer are counted."""
        own = expert_modules(model)
        sizes: list[dict[str, int]] = [{name: module.num_experts for name, module in own.items()}]
        if dist.is_initialized():  # ranks of a pipeline hold different layers
            sizes = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(sizes, {name: module.num_experts for name, module in own.items()})
        experts = {name: size for of_rank in sizes for name, size in of_rank.items()}
        self._counts: Tensor | None = None
        if experts:
            device = next(model.parameters()).device
            self._counts = torch.zeros(len(experts), max(experts.values()), dtype=torch.int64, device=device)
            rows = dict(zip(sorted(experts), self._counts, strict=True))
            for name, module in own.items():
                module.register_forward_pre_hook(partial(_count, rows[name]))

    def take(self) -> Tensor | None:
        """Returns the largest load since the last call, and begins again; None for a dense model.

        It is the number of tokens of a layer's busiest expert over the mean of the layer's experts, of the layer where
        this is largest. Experts of ranks with the same tokens count several times, which does not change it.
        """
        if self._counts is None:
            return None
        total = all_reduce_sum(self._counts.double())
        self._counts.zero_()
        mean = total.mean(dim=1).clamp(min=torch.finfo(total.dtype).tiny)
        return (total.amax(dim=1) / mean).amax()


def expert_load_of(engine: Engine, plan: Plan) -> ExpertLoad | None:
    """Returns the counter of a mixture of experts; None for a dense model.

    Also for `nn.DataParallel`, whose copies of the model are on several devices.
    """
    counts = plan.model.experts > 0 and plan.parallel.strategy != "data_parallel"
    return ExpertLoad(engine.model) if counts else None


def _count(counts: Tensor, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Adds the choices of a training pass. inputs: hidden states, and the experts that each token has chosen."""
    if module.training:
        chosen = inputs[1].reshape(-1)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
