"""What an engine without a checkpoint format of its own leaves in a checkpoint: one file for each part.

`engine/rank_NNNNN.pt` holds tensors and numbers only, so that it is read with `weights_only`. Where
each rank holds the whole model there is one file, else one for each rank with its shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

FOLDER = "engine"
"""Folder of these files in a checkpoint."""

State = dict[str, Any]


def write(checkpoint: Path, rank: int, state: State) -> None:
    """Writes the part of a rank."""
    (checkpoint / FOLDER).mkdir(exist_ok=True)
    torch.save(state, _file(checkpoint, rank))


def read(checkpoint: Path, rank: int, device: torch.device) -> State:
    """The part that a rank wrote."""
    state: State = torch.load(_file(checkpoint, rank), map_location=device, weights_only=True)
    return state


def whole_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights of all parts under their Hugging Face names: one file's, or the shards joined along dimension 0."""
    files = sorted((checkpoint / FOLDER).glob("rank_*.pt"))
    parts = [torch.load(file, map_location="cpu", mmap=True, weights_only=True)["weights"] for file in files]
    return {name: torch.cat([part[name] for part in parts]) if len(parts) > 1 else parts[0][name] for name in parts[0]}


def local(value: Tensor) -> Tensor:
    """This rank's part of a parameter or a state. Raises ValueError for cuts other than along dimension 0."""
    value = value.detach()
    if not isinstance(value, DTensor):
        return value
    if value.placements != (Shard(0),):
        raise ValueError(f"no checkpoint can be made of shards along {value.placements}")
    return value.to_local()


def optimizer_state(optimizer: Optimizer) -> State:
    """`optimizer.state_dict()` with this rank's part of each tensor."""
    state = optimizer.state_dict()
    states = {
        index: {key: local(value) if isinstance(value, Tensor) else value for key, value in one.items()}
        for index, one in state["state"].items()
    }
    return {**state, "state": states}


def load_optimizer_state(optimizer: Optimizer, state: State) -> None:
    """Takes back what `optimizer_state` gave. A state with dimensions is shaped, and so sharded, as its parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        index: {key: _as(value, parameters[index]) for key, value in one.items()}
        for index, one in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": states})


def _as(value: Any, parameter: Tensor) -> Any:
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.ndim == 0:
        return value
    return DTensor.from_local(
        value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def _file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / FOLDER / f"rank_{rank:05d}.pt"
