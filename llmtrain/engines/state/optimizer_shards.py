"""Optimizer shards: what the optimizers of torch and DeepSpeed hold of each parameter in this rank's memory.

DeepSpeed's ZeRO flattens the parameters of a group, and gives torch's optimizer this rank's range of the result. This
module returns each parameter's part of the range as a view: reads see live values, and writes take effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from llmtrain.engines.optimizers.guarded import Factor, GuardedOptimizer
from llmtrain.engines.optimizers.own import OwnOptimizer
from llmtrain.overrides.deepspeed import flat_tensors
from llmtrain.overrides.torch import local
from llmtrain.system.piece_headers import WEIGHT

STEP = "step"
"""Torch's key for the number of updates that an optimizer has counted."""


@dataclass
class OptimizerShard:
    """A flat range of a parameter, with its optimizer states."""

    parameter: nn.Parameter
    """The model's parameter."""
    start: int
    """Index of the range's first element within the part of the parameter that this rank would hold without ZeRO."""
    tensors: dict[str, Tensor]
    """One-dimensional views, by kind."""
    state: dict[str, Any]
    """Torch's state of the tensor that contains this range; other ranges may share it."""
    trained: Tensor
    """The tensor that the optimizer trains and that contains this range."""
    offset: int = 0
    """Index of the range's first element within that tensor."""
    factors: dict[str, Factor] = field(default_factory=dict)
    """States with shapes of their own, by kind."""

    @property
    def steps(self) -> Tensor | None:
        """Number of updates that the optimizer has counted: its own scalar, not a copy."""
        return self.state.get(STEP)


OptimizerShardLists = Iterable[list[OptimizerShard]]


def optimizer_shards(
    optimizer: Any, masters: Mapping[nn.Parameter, nn.Parameter] | None = None
) -> Iterator[list[OptimizerShard]]:
    """Yields all that an optimizer holds, in lists; the tensors of a list are valid until the next list is requested.

    optimizer: from torch or DeepSpeed. masters: maps a parameter of the model to the fp32 copy that is trained in its
    place, if an engine keeps such copies itself. A torch optimizer without state gets a state of zeros, with which it
    would begin.
    """
    flat_lists = flat_tensors(optimizer)
    if flat_lists is None:
        yield _shards_of_torch_optimizer(optimizer, masters or {})
        return
    for flats in flat_lists:
        shards = []
        for flat, parts, group in flats:
            state = _state(optimizer.optimizer, flat, group)
            tensors = {WEIGHT: flat.detach()} | dict(_states_of_same_shape(state, flat))
            for part in parts:
                views = {kind: tensor.narrow(0, part.offset, part.length) for kind, tensor in tensors.items()}
                factors = _factors(optimizer.optimizer, part.parameter, flat)
                shards.append(OptimizerShard(part.parameter, part.start, views, state, flat, part.offset, factors))
        yield shards


def trained_tensors(optimizer: Any) -> list[Tensor]:
    """Returns what torch's optimizer trains on this rank: flat tensors, or weights; in an order that ranks share."""
    flat_lists = flat_tensors(optimizer)
    if flat_lists is None:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [flat.tensor for flats in flat_lists for flat in flats]


def _shards_of_torch_optimizer(
    optimizer: Optimizer, masters: Mapping[nn.Parameter, nn.Parameter]
) -> list[OptimizerShard]:
    parameter_of = {master: parameter for parameter, master in masters.items()}
    shards = []
    for group in optimizer.param_groups:
        for trained in group["params"]:
            state = _state(optimizer, trained, group)
            views = {WEIGHT: local_flat(trained)} | {
                kind: local_flat(tensor) for kind, tensor in _states_of_same_shape(state, trained)
            }
            parameter = parameter_of.get(trained, trained)
            factors = _factors(optimizer, parameter, trained)
            shards.append(OptimizerShard(parameter, first_index(trained), views, state, trained, factors=factors))
    return shards


def _factors(optimizer: Optimizer, parameter: nn.Parameter, trained: Tensor) -> dict[str, Factor]:
    if isinstance(optimizer, OwnOptimizer):
        return optimizer.factors(trained)
    return optimizer.factors(parameter) if isinstance(optimizer, GuardedOptimizer) else {}


def _state(optimizer: Optimizer, trained: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """Returns torch's state of a tensor that it trains, and makes the state if there is none yet."""
    if isinstance(optimizer, OwnOptimizer):
        return {**optimizer.make_state(trained, group), STEP: optimizer.updates(trained)}
    state: dict[str, Any] = optimizer.state[trained]
    if not state and isinstance(optimizer, GuardedOptimizer):
        state.update(optimizer.first_state(group, trained))
    elif not state and isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
        on_device = group["capturable"] or group["fused"]
        state[STEP] = torch.zeros((), dtype=torch.float32, device=trained.device if on_device else "cpu")
        state["exp_avg"] = torch.zeros_like(trained, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(trained, memory_format=torch.preserve_format)
    elif isinstance(optimizer, torch.optim.SGD) and group["momentum"] and state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(trained, memory_format=torch.preserve_format)
    return state


def _states_of_same_shape(state: Mapping[str, Any], trained: Tensor) -> list[tuple[str, Tensor]]:
    """Returns the tensors of a state that have the shape of the trained tensor."""
    return [
        (kind, value)
        for kind, value in state.items()
        if kind != STEP and isinstance(value, Tensor) and value.shape == trained.shape
    ]


def local_flat(tensor: Tensor) -> Tensor:
    """Returns a flat view of the part on this rank."""
    return local(tensor.detach()).view(-1)


def first_index(tensor: Tensor) -> int:
    """Returns the flat index of this rank's first element; the tensor is sharded along dimension 0 or not at all."""
    if not isinstance(tensor, DTensor):
        return 0
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return int(chunks[0].offsets[0]) * row if chunks and chunks[0].sizes[0] else 0
