"""DeepSpeed's reduction of gradients at ZeRO-0, left out where there is nobody to reduce with."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch import distributed as dist


def reduce_among_several(engine: DeepSpeedEngine) -> None:
    """Has gradients stay where they are in a group of one rank.

    DeepSpeed 0.19.8 copies all of them into a buffer and back, which takes time and as much memory again. Where a group
    of one is told to divide by more, as for experts that only one rank has, it goes on.
    """
    own = engine.allreduce_no_retain

    def reduce(bucket: list[Tensor], dp_group: dist.ProcessGroup, **options: Any) -> None:
        if dist.get_world_size(dp_group) > 1 or options.get("dp_world_size") != 1:
            own(bucket, dp_group, **options)

    engine.allreduce_no_retain = reduce
