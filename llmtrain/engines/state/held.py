"""What the optimizers of torch and of DeepSpeed hold in this rank's memory, parameter by parameter.

DeepSpeed's ZeRO flattens the parameters of a group, and gives torch's optimizer this rank's range of the result. This
module returns each parameter's part of the range as a view: reads see live values, and writes take effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from llmtrain.system.piece_heads import WEIGHT

STEP = "step"
"""Torch's key for the number of updates that an optimizer has counted."""


@dataclass
class Held:
    """This rank's flat range of a parameter."""

    parameter: nn.Parameter
    """The model's parameter."""
    start: int
    """Index of the range's first element within the part of the parameter that this rank would hold without ZeRO."""
    tensors: dict[str, Tensor]
    """One-dimensional views, by kind."""
    state: dict[str, Any]
    """Torch's state of the tensor that contains this range; other ranges may share it."""

    @property
    def steps(self) -> Tensor | None:
        """Number of updates counted, a live scalar."""
        return self.state.get(STEP)


def held(optimizer: Any, masters: Mapping[nn.Parameter, nn.Parameter] | None = None) -> Iterator[list[Held]]:
    """Yields all that an optimizer holds, in lists; the tensors of a list are valid until the next list is requested.

    optimizer: from torch or DeepSpeed. masters: maps a parameter of the model to the fp32 copy that is trained in its
    place, if an engine keeps such copies itself. A torch optimizer without state gets a state of zeros, with which it
    would begin.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        yield from _held_by_stage_3(optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        yield _held_by_partitions(optimizer, optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups)
    elif isinstance(optimizer, BF16_Optimizer):
        yield _held_by_partitions(optimizer, optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)
    else:
        yield _held_by_torch(optimizer, masters or {})


@torch.no_grad()
def weights_changed(optimizer: Any) -> None:
    """Updates the model's weights after the fp32 weights of a ZeRO optimizer were written; called by all ranks."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for index in range(len(optimizer.fp16_groups)):
            with _swapped_in(optimizer, index):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            # Small parameters stay gathered, and their gathered values are outdated.
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _held_by_torch(optimizer: Optimizer, masters: Mapping[nn.Parameter, nn.Parameter]) -> list[Held]:
    models = {master: parameter for parameter, master in masters.items()}
    found = []
    for group in optimizer.param_groups:
        for trained in group["params"]:
            state = _state(optimizer, trained)
            tensors = {WEIGHT: local_flat(trained)} | {
                kind: local_flat(tensor) for kind, tensor in _shaped(state, trained)
            }
            found.append(Held(models.get(trained, trained), first_index(trained), tensors, state))
    return found


def _held_by_partitions(optimizer: Any, groups: list[list[nn.Parameter]], flats: list[Tensor]) -> list[Held]:
    """ZeRO 1 and 2: this rank has one range of each group, which may begin and end within parameters."""
    found = []
    for parameters, flat in zip(groups, flats, strict=True):
        state = _state(optimizer.optimizer, flat)
        for parameter in parameters:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # None if no part of it is on this rank
            if mapping is None:
                continue
            place = mapping.get_hp_fragment_address()
            tensors = _narrowed(flat, state, place.start, place.numel)
            found.append(Held(parameter, mapping.lp_fragment_address.start, tensors, state))
    return found


def _held_by_stage_3(optimizer: Any) -> Iterator[list[Held]]:
    """ZeRO 3: this rank has an equal range of every parameter; the last ranges are padded."""
    for index, parameters in enumerate(optimizer.fp16_groups):
        with _swapped_in(optimizer, index):
            flat = optimizer.fp32_partitioned_groups_flat[index]
            state = _state(optimizer.optimizer, flat)
            rank = optimizer._get_sub_group_partition_rank(index)
            offset, found = 0, []
            for parameter in parameters:
                size = parameter.partition_numel()
                start = min(rank * size, parameter.ds_numel)
                length = min(size, parameter.ds_numel - start)
                found.append(Held(parameter, start, _narrowed(flat, state, offset, length), state))
                offset += size
            yield found


@contextmanager
def _swapped_in(optimizer: Any, index: int) -> Iterator[None]:
    """Loads a group of ZeRO 3 into memory if its states are on NVMe."""
    swapped = optimizer._swappable_optimizer_subgroup(index)
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_in(index)
    yield
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_out(index)


def _state(optimizer: Optimizer, trained: Tensor) -> dict[str, Any]:
    """Returns torch's state of a tensor that it trains, and makes the state if there is none yet."""
    state: dict[str, Any] = optimizer.state[trained]
    group = optimizer.param_groups[0]
    if not state and isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
        on_device = group["capturable"] or group["fused"]
        state[STEP] = torch.zeros((), dtype=torch.float32, device=trained.device if on_device else "cpu")
        state["exp_avg"] = torch.zeros_like(trained, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(trained, memory_format=torch.preserve_format)
    elif isinstance(optimizer, torch.optim.SGD) and group["momentum"] and state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(trained, memory_format=torch.preserve_format)
    return state


def _shaped(state: Mapping[str, Any], trained: Tensor) -> list[tuple[str, Tensor]]:
    """Returns the tensors of a state that have the shape of the trained tensor."""
    return [
        (kind, value)
        for kind, value in state.items()
        if kind != STEP and isinstance(value, Tensor) and value.shape == trained.shape
    ]


def _narrowed(flat: Tensor, state: Mapping[str, Any], offset: int, length: int) -> dict[str, Tensor]:
    whole = {WEIGHT: flat.detach()} | dict(_shaped(state, flat))
    return {kind: tensor.narrow(0, offset, length) for kind, tensor in whole.items()}


def local_flat(tensor: Tensor) -> Tensor:
    """Returns a flat view of the part on this rank."""
    local = tensor.detach()
    return (local.to_local() if isinstance(local, DTensor) else local).view(-1)


def first_index(tensor: Tensor) -> int:
    """Returns the flat index of this rank's first element; the tensor is sharded along dimension 0 or not at all."""
    if not isinstance(tensor, DTensor):
        return 0
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return int(chunks[0].offsets[0]) * row if chunks and chunks[0].sizes[0] else 0
