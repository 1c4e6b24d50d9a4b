"""How a rank that computes on a CPU gets its memory."""

from __future__ import annotations

import ctypes
import os

from llmtrain.host import memory_bytes, memory_limit
from llmtrain.plan import Plan
from llmtrain.plan.memory import memory_of

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of <malloc.h>."""
NEVER = 2**31 - 1
ROOM = 3
"""Times what a plan needs: pieces that are kept do not fit all that comes, and peaks were seen to double."""


def keep_freed_memory(plan: Plan) -> None:
    """Has glibc give no freed memory back to the system, where the host has room for that.

    By default each tensor above 32 MiB, as logits are, has a mapping of its own, whose pages the system clears anew in
    every step (mallopt(3)). That was a twentieth of a pass with logits of 8 MiB, a third of one with 250 MiB
    (benchmarks/README.md, question `host`). Nothing is done without glibc, and where a user has set how it allocates.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ) or not _has_room(plan):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, NEVER)


def _has_room(plan: Plan) -> bool:
    memory = memory_of(plan)
    if memory is None:
        return False
    available = min(memory_bytes(), memory_limit() or memory_bytes())
    of_host = max(stage.host + stage.host_copies for stage in memory.stages)  # what is offloaded lies in it, too
    return ROOM * plan.cluster.devices_per_node * (memory.needed + of_host) <= available
