"""Memory allocation of a rank that computes on a CPU."""

from __future__ import annotations

import ctypes
import os

from llmtrain.plan import Plan
from llmtrain.predict import memory_of
from llmtrain.system.host import memory_bytes, memory_limit

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Constants of <malloc.h>."""
NEVER = 2**31 - 1
ROOM = 3
"""Factor on what a plan needs: retained blocks do not fit all later requests, and peaks were observed to double."""


def keep_freed_memory(plan: Plan) -> None:
    """Makes glibc keep freed memory instead of returning it to the system, if the host has enough memory.

    By default each tensor above 32 MiB, such as logits, has a mapping of its own, whose pages the system clears in
    every step (mallopt(3)). That took a twentieth of a pass with logits of 8 MiB, and a third of one with 250 MiB
    (benchmarks/README.md, question `host`). Does nothing without glibc, or if a user has configured the allocator.
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
    of_host = max(stage.host + stage.host_copies for stage in memory.stages)  # offloaded tensors use the same memory
    return ROOM * plan.cluster.devices_per_node * (memory.needed + of_host) <= available
