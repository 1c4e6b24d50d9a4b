"""The interface between an axis of parallelism and the DeepSpeed engine.

There is a single engine (`engine.py`). Each axis is a part of it and has one file: `tensor`, `expert`, `sequence` and
`pipeline`, which includes the slices of its stages. `autotp` replaces `tensor` if experts are distributed. Without any
axis, the engine still has data parallelism and ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch import distributed as dist

from llmtrain.data import MicroBatch
from llmtrain.engines.state.pieces import Region
from llmtrain.plan import Plan


@dataclass(frozen=True)
class Portion:
    """The part of a weight that this rank holds if an axis divides the weight, before ZeRO shards it."""

    region: Region
    """Its location in the whole weight."""
    holders: dist.ProcessGroup
    """The ranks that hold the portions of this weight, this rank included."""
    replicas: dist.ProcessGroup | None
    """The ranks that hold this portion, over which ZeRO shards it; None for all ranks."""


class EngineAxis:
    """An axis of parallelism. All ranks call every method; by default, a method changes nothing."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.device = device

    # These methods are called while the engine is built, in this order.

    def prepare(self, ds_config: dict[str, Any]) -> None:
        """Makes process groups. Raises RecipeError for a model that cannot be divided, before the model is built."""

    def build(self, ds_config: dict[str, Any]) -> nn.Module | None:
        """Returns the module that DeepSpeed trains; None if it is the whole model, built as without this axis."""
        return None

    def parameter_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the parameter groups for DeepSpeed's optimizer."""
        return groups

    def attach(self, engine: DeepSpeedEngine) -> None:
        """Changes DeepSpeed's engine, or its model `engine.module`, after `deepspeed.initialize`."""

    # These methods are called in each step.

    def active(self) -> AbstractContextManager[None]:
        """Returns the context of forward and backward passes."""
        return nullcontext()

    def slice(self, batch: MicroBatch) -> MicroBatch:
        """Returns this rank's part of a micro-batch."""
        return batch

    def before_backward(self) -> None:
        """Runs before the backward pass of each micro-batch."""

    # These methods describe which rank holds what. Only one axis of an engine has each of `grid`, `replicas`, `slices`,
    # `copies` and `named_weights` (`owner`), as of `build`; each weight is divided by one axis.

    @property
    def grid(self) -> Any:
        """The object that describes the groups to DeepSpeed; None if DeepSpeed makes them itself."""
        return None

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of the model; None if this axis does not determine them."""
        return None

    @property
    def slices(self) -> dist.ProcessGroup | None:
        """The ranks that hold slices of this rank's sequences; None if this axis does not divide them."""
        return None

    @property
    def copies(self) -> dist.ProcessGroup | None:
        """The ranks of a replica that hold equal copies of undivided weights; None if only this rank holds them."""
        return None

    def portion(self, name: str, tensor: Tensor) -> Portion | None:
        """Returns this rank's portion of a parameter or buffer of the model; None if this axis does not divide it."""
        return None

    def whole(self, parameter: nn.Parameter, own: Tensor) -> Tensor:
        """Returns the whole weight, assembled from what the ranks hold; `own` is this rank's part."""
        return own

    def hugging_face_name(self, name: str) -> str:
        """Returns the Hugging Face name of a parameter or buffer of the engine's model."""
        return name

    def named_weights(self, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]] | None:
        """Returns an iterator over every whole weight by its Hugging Face name.

        Returns None if the model's own parameters have these names already.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """Returns what this rank holds, for the run's record."""
        return {}


def owner(axes: Sequence[EngineAxis], name: str) -> EngineAxis | None:
    """Returns the axis that has a responsibility of the engine; None if none has it. Raises ValueError for two."""
    found = [axis for axis in axes if getattr(type(axis), name) is not getattr(EngineAxis, name)]
    if len(found) > 1:
        raise ValueError(f"{' and '.join(type(axis).__name__ for axis in found)} both have {name}")
    return found[0] if found else None
