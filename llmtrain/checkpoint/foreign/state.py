"""What a reader finds in a folder of another program: weights, states of their optimizer, and the steps taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmtrain.checkpoint.foreign.pickles import StoredTensor
from llmtrain.system.piece_headers import WEIGHT

STEP = "step"
"""Torch's key for the number of updates that an optimizer has counted."""
PREFIXES = ("", "model.", "module.", "state_dict.", "app.model.", "_model.")
"""What may stand before all names of weights in a folder."""
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that DDP, torch.compile, FSDP and recomputation add."""


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of a folder, which is read on demand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Returns it on the CPU, in its shape."""

    @classmethod
    def of(cls, stored: StoredTensor) -> ForeignTensor:
        """Returns a tensor of a file."""
        return cls(stored.shape, stored.dtype, stored.read)


@dataclass(frozen=True)
class ForeignGroup:
    """A group of an optimizer's parameters."""

    names: tuple[str, ...]
    options: Mapping[str, Any]
    """Learning rate, betas and so on, by torch's names."""


@dataclass(frozen=True)
class UnnamedOptimizer:
    """A state of torch's optimizer, which knows its parameters only by their order in the model."""

    groups: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...]
    """The numbers of each group's parameters, and its options."""
    states: Mapping[int, Mapping[str, StoredTensor]]
    """The tensors of each parameter; among them its fp32 weight if the model's is of another precision."""
    updates: Mapping[int, float]
    file: str
    """Where it was read."""


@dataclass
class ForeignState:
    """The state of a run of another program."""

    program: str
    """What wrote it, as far as the folder tells."""
    step: int | None = None
    """Number of optimizer steps taken; None if the folder does not tell."""
    weights: dict[str, ForeignTensor] = field(default_factory=dict)
    """By the names of the folder; fp32 master weights where there are any."""
    states: dict[str, dict[str, ForeignTensor]] = field(default_factory=dict)
    """The optimizer's tensors by weight and kind, each in the shape of its weight."""
    updates: dict[str, float] = field(default_factory=dict)
    """The number of updates that the optimizer has counted, by weight."""
    groups: list[ForeignGroup] = field(default_factory=list)
    unnamed: UnnamedOptimizer | None = None
    """The optimizer's state if the folder does not name its weights."""
    buffers: frozenset[str] = frozenset()
    """Names among `weights` of what is no parameter."""
    differences: list[str] = field(default_factory=list)
    """How its model differs from that of the recipe, for people."""
    unread: list[str] = field(default_factory=list)
    """What the folder has and an import leaves out."""


def split_state(state: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[dict[str, StoredTensor], float]:
    """Returns the tensors of a parameter's state in torch's form, and the updates counted (some count by group)."""
    steps = plain_number(state.get(STEP, options.get(STEP, 0)))
    return {kind: value for kind, value in state.items() if kind != STEP and isinstance(value, StoredTensor)}, steps


def plain_number(value: Any) -> float:
    """Returns a number that may be in a tensor; 0 for anything else."""
    if isinstance(value, StoredTensor):
        return value.scalar() if value.numel == 1 else 0.0
    return float(value) if isinstance(value, int | float) else 0.0


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a parameter group that are plain values."""
    return {
        name: plain_number(value) if isinstance(value, StoredTensor) else value
        for name, value in group.items()
        if is_option(value)
    }


def is_option(value: Any) -> bool:
    """Whether a value is a number, a text or a flag, or a few numbers such as betas."""
    if isinstance(value, list | tuple):
        return len(value) < 10 and all(isinstance(one, int | float) for one in value)
    return value is None or isinstance(value, int | float | str | StoredTensor)


def unwrapped(name: str) -> str:
    """Returns a name without the parts that wrappers of modules add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unnamed_optimizer(
    optimizer: Mapping[str, Any], file: str, weights: Sequence[Sequence[StoredTensor]] = ()
) -> UnnamedOptimizer:
    """Returns the state dictionary of a torch optimizer as it was read from a file.

    weights: those that the optimizer updates, by group, where they are not the model's own.
    """
    groups = tuple((tuple(group["params"]), options_of(group)) for group in optimizer["param_groups"])
    states, updates = {}, {}
    for numbers, options in groups:
        for number in numbers:
            states[number], updates[number] = split_state(optimizer["state"].get(number, {}), options)
    for (numbers, _), own in zip(groups, weights, strict=bool(weights)):
        for number, weight in zip(numbers, own, strict=True):
            states[number][WEIGHT] = weight
    return UnnamedOptimizer(groups, states, updates, file)


def align_states(state: ForeignState) -> None:
    """Gives states of the optimizer the names of their weights, where only prefixes or wrappers differ."""
    weights = {unwrapped(name): name for name in state.weights}

    def aligned(name: str) -> str:
        plain = unwrapped(name)
        return next((weights[prefix + plain] for prefix in PREFIXES if prefix + plain in weights), name)

    state.states = {aligned(name): tensors for name, tensors in state.states.items()}
    state.updates = {aligned(name): count for name, count in state.updates.items()}
    state.groups = [ForeignGroup(tuple(map(aligned, group.names)), group.options) for group in state.groups]
