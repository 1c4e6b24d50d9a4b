"""The interface between an axis of parallelism and the DeepSpeed engine.

There is a single engine (`engine.py`). Each axis is a part of it and has one file: `tensor`, `expert`, `sequence` and
`pipeline`, which includes the slices of its stages. Without any axis, the engine still has data parallelism and ZeRO.
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
from llmtrain.engines.state.shards import WeightSlice
from llmtrain.models.sharding import Sharding
from llmtrain.plan import Plan


@dataclass(frozen=True)
class WeightShard:
    """This rank's shard of a weight that an axis divides, before ZeRO divides the shard."""

    weight_slice: WeightSlice
    """Its place in the whole weight."""
    group: dist.ProcessGroup
    """The ranks that together hold the whole weight, this rank included."""
    replica_group: dist.ProcessGroup | None
    """The ranks that hold replicas of this shard, over which ZeRO divides it; None for all ranks."""


class EngineAxis:
    """An axis of parallelism. All ranks call every method; by default, a method changes nothing."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.device = device

    # These methods are called while the engine is built, in this order.

    def prepare(self, ds_config: dict[str, Any]) -> None:
        """Makes process groups. Raises RecipeError for a model that cannot be divided, before the model is built."""

    def sharding(self) -> Sharding | None:
        """Returns how this axis shards the parameters while the model is built; None if every rank holds all of it."""
        return None

    def place(self, module: nn.Module) -> None:
        """Tells DeepSpeed what it has to know of the parameters of a module; called again when adapters are added."""

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

    # These methods describe which rank holds what. At most one axis of an engine overrides each of `mpu`,
    # `named_weights` and the groups (`overriding`). Each weight is divided by at most one axis.

    @property
    def mpu(self) -> Any:
        """The object that describes the groups to DeepSpeed, as Megatron-LM's; None if DeepSpeed makes them itself."""
        return None

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of the model; None if this axis does not determine them."""
        return None

    @property
    def sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the slices of this rank's sequences; None if this axis does not divide sequences."""
        return None

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that divide the weights of layers, and hold replicas of undivided ones; None: this rank only."""
        return None

    @property
    def expert_replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same experts; None if this axis does not distribute experts."""
        return None

    def weight_shard(self, name: str, tensor: Tensor) -> WeightShard | None:
        """Returns this rank's shard of a parameter or buffer of the model; None if this axis does not divide it."""
        return None

    def full_tensor(self, parameter: Tensor, shard: Tensor) -> Tensor:
        """Returns the whole weight, gathered from the shards of the ranks; `shard` is this rank's."""
        return shard

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


def overriding(axes: Sequence[EngineAxis], name: str) -> EngineAxis | None:
    """Returns the axis that overrides a method of `EngineAxis`; None if none does. Raises ValueError for several."""
    overrides = [axis for axis in axes if getattr(type(axis), name) is not getattr(EngineAxis, name)]
    if len(overrides) > 1:
        raise ValueError(f"{' and '.join(type(axis).__name__ for axis in overrides)} both have {name}")
    return overrides[0] if overrides else None
