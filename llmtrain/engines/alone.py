"""One rank of a run without the others: for work on how a plan cuts its state, which needs no other rank.

Collectives of torch's `fake` backend return at once, with whatever was in their buffers. So an engine can be built, and
what it holds be filled, but not trained.
"""

from __future__ import annotations

import os

import deepspeed
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def pretend(rank: int, world_size: int) -> None:
    """Makes this process a rank of a group that has no others. For a process that does nothing else."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # nobody is met there
    )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    deepspeed.init_distributed(dist_backend="fake", verbose=False, dist_init_required=False)


def is_alone() -> bool:
    """Whether the other ranks of the group are pretended."""
    return dist.is_initialized() and dist.get_backend() == "fake"
