"""Configures how a rank computes on a CPU: memory, threads and matrix products."""

from __future__ import annotations

import ctypes
import os
from functools import cache

import torch

from llmtrain.overrides.onednn import multiply_by_onednn
from llmtrain.plan import Plan
from llmtrain.plan.predict import memory_of
from llmtrain.system.host import memory_bytes, memory_limit, processor_field

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Constants of <malloc.h>."""
NEVER = 2**31 - 1
ROOM = 3
"""Factor on the memory of a plan: retained blocks do not fit all later requests, and peaks were observed to double."""


def use_kernels_of_cpu(plan: Plan) -> None:
    """Sets the number of threads, if the recipe has one, and the library for matrix products."""
    if isinstance(threads := plan.recipe.kernels.threads, int):
        torch.set_num_threads(threads)
    multiply_by_onednn(matmul_of(plan) == "onednn")


def matmul_of(plan: Plan) -> str:
    """Returns the library that computes matrix products: the recipe's, or one chosen by the kind of processor."""
    chosen, precision = plan.recipe.kernels.matmul, plan.recipe.parallel.precision
    if chosen != "auto":
        return chosen
    return "onednn" if precision == "fp32" and _lacks_avx512_in_mkl() else "torch"


@cache
def _lacks_avx512_in_mkl() -> bool:
    """Whether this processor has AVX-512, but MKL does not use it, since the processor is not Intel's."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_both and has_avx512 and processor_field("vendor_id") != "GenuineIntel"


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
