"""What an axis of parallelism says of itself to the DeepSpeed engine.

The engine is one (`llmtrain.engines.deepspeed`). Each axis is a part of it and lies in one file: `tensor`, `expert`,
`sequence` and `pipeline`, with the slices of its stages. Data parallelism and ZeRO are what is there without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.data import MicroBatch
from llmtrain.engines.pieces import Region
from llmtrain.plan import Plan

if TYPE_CHECKING:
    from llmtrain.engines.deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class Portion:
    """What this rank holds of a weight that an axis divides, ZeRO aside."""

    region: Region
    """Where it lies in the whole weight."""
    holders: dist.ProcessGroup
    """The ranks that hold the other portions, this one included."""
    replicas: dist.ProcessGroup | None
    """The ranks that hold this portion, over which ZeRO shards it; None for all ranks."""


class Axis:
    """An axis of parallelism. Every method is called by all ranks, and changes nothing unless it is overridden."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.device = device

    # While the engine is built, in this order.

    def prepare(self, ds_config: dict[str, Any]) -> None:
        """Makes process groups. Raises RecipeError for a model that cannot be divided, before it is built."""

    def build(self, ds_config: dict[str, Any]) -> nn.Module | None:
        """The module that DeepSpeed trains; None where it is the whole model, built as without this axis."""
        return None

    def parameter_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups that DeepSpeed's optimizer is made of."""
        return groups

    def attach(self, engine: DeepSpeedEngine) -> None:
        """Changes the engine after `deepspeed.initialize`."""

    # In each step.

    def active(self) -> AbstractContextManager[None]:
        """The context of forward and backward passes."""
        return nullcontext()

    def slice(self, batch: MicroBatch) -> MicroBatch:
        """This rank's part of a micro-batch."""
        return batch

    def before_backward(self) -> None:
        """Runs before the backward pass of each micro-batch."""

    # Where the weights lie.

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks with equal parts of the model; None where this axis leaves them all ranks."""
        return None

    @property
    def copies(self) -> dist.ProcessGroup | None:
        """The ranks of one replica that hold the same of what this axis does not divide; None for this one alone."""
        return None

    def portion(self, name: str, tensor: Tensor) -> Portion | None:
        """What this rank holds of a parameter or a buffer of the model; None where this axis does not divide it."""
        return None

    def tied_copy(self, name: str) -> tuple[int, int]:
        """Of a parameter that several stages hold: which of its copies this is, and their number."""
        return 0, 1

    def whole(self, parameter: nn.Parameter, own: Tensor) -> Tensor:
        """The whole weight, from what this rank holds of it."""
        return own

    def sum_squares(self, square: Tensor) -> None:
        """Adds the squared norms of gradients that other ranks hold, in place."""

    def hugging_face_name(self, name: str) -> str:
        """Of a parameter or a buffer of the engine's model."""
        return name

    def named_weights(self, whole: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]] | None:
        """Every weight, whole, under its Hugging Face name; None where it is a parameter of the same name."""
        return None
