"""One rank of a run without the others, for code that examines how a plan divides its state.

Collectives of torch's `fake` backend return at once and leave their buffers as they were. An engine can therefore be
built and filled with values, but it cannot be trained.
"""

from __future__ import annotations

import os

import deepspeed
from torch import distributed as dist

from llmtrain.overrides.deepspeed import use_no_compiled_collective
from llmtrain.overrides.torch import join_fake_group


def pretend(rank: int, world_size: int) -> None:
    """Makes this process a rank of a group without other members, and can be used for nothing else."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # no process connects to it
    )
    join_fake_group(rank, world_size)
    use_no_compiled_collective()
    deepspeed.init_distributed(dist_backend="fake", verbose=False, dist_init_required=False)


def is_alone() -> bool:
    """Returns whether the group is the fake one that `pretend` makes."""
    return dist.is_initialized() and dist.get_backend() == "fake"
