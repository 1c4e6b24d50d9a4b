"""The states of a recurrence or a convolution between two segments of a document, as a cache of `transformers`.

Since 5.24, recurrences and convolutions of all families read their states from a cache and write them to it by the same
methods, and get the kernels' initial and final states from there. The caches of `transformers` copy states in place,
for which there is no gradient; these keep the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from llmtrain.overrides.transformers import CACHE

Layout = list[tuple[tuple[str, int], tuple[int, ...], torch.dtype]]
"""Kind and index of each state, its shape and its type."""


class States:
    """A cache with the states of one part of a layer; empty at the beginning of a document."""

    def __init__(self, kept: dict[tuple[str, int], Tensor] | None = None) -> None:
        """kept: by kind (`conv` or `recurrent`) and index, each [segments, …]."""
        self.kept = kept or {}

    @property
    def layout(self) -> Layout:
        """What another rank needs to know to receive these states."""
        return [(key, tuple(state.shape), state.dtype) for key, state in sorted(self.kept.items())]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The states in the order of the layout."""
        return tuple(state for _, state in sorted(self.kept.items()))

    @classmethod
    def of(cls, layout: Layout, tensors: tuple[Tensor, ...]) -> States:
        """Returns the states with this layout."""
        return cls({key: tensor for (key, _, _), tensor in zip(layout, tensors, strict=True)})

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the last inputs of a convolution, [segments, channels, kernel size]; None at a beginning."""
        return self.kept.get(("conv", state_idx))

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **others: Any
    ) -> Tensor:
        """Keeps the last inputs of a convolution. Returns the inputs after those that were kept.

        inputs: [segments, channels, tokens].
        """
        before = self.kept.get(("conv", state_idx))
        whole = inputs if before is None else torch.cat([before, inputs], dim=-1)
        size = conv_kernel_size or (inputs if before is None else before).shape[-1]
        self.kept["conv", state_idx] = nn.functional.pad(whole, (size - whole.shape[-1], 0))  # cuts if it is longer
        return whole

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the state of a recurrence, [segments, …]; None at a beginning."""
        return self.kept.get(("recurrent", state_idx))

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **others: Any) -> Tensor:
        """Keeps the state of a recurrence, and returns it."""
        self.kept["recurrent", state_idx] = state
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a segment continues from these states."""
        return bool(self.kept)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns True, so that a single token is computed as several are; generation has no gradients."""
        return True


class Handover(Protocol):
    """The exchange of states with the ranks of the slices before and after, during one call of a part."""

    def receive(self) -> States:
        """Returns the states of the next row whose document continues from the slice before."""

    def send(self, output: Tensor, states: States) -> Tensor:
        """Sends the states of the next row whose document continues in the slice after.

        Returns `output`, whose backward pass waits for the gradients of these states.
        """


def takes_states(kind: type[nn.Module]) -> bool:
    """Whether a class of parts may take a cache."""
    return CACHE in signature(kind.forward).parameters


def with_states(named: Mapping[str, Any], states: States) -> dict[str, Any]:
    """Returns the named arguments of a part with a cache."""
    return {**named, CACHE: states}
