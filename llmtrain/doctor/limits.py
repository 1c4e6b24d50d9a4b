"""Resource limits of the kernel for a process."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from llmtrain.doctor.finding import Finding, fault, ok, size, warning
from llmtrain.doctor.interconnect import has_adapters
from llmtrain.doctor.scene import Scene

LEAST_FILES = 4096
"""File descriptors: connections to other ranks, data files, and those of libraries."""
LEAST_PROCESSES = 4096
"""Processes and threads of one user: each worker has dozens."""


def limits(scene: Scene) -> Iterator[Finding]:
    """Checks nofile, memlock and nproc, as this process has inherited them."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)
    memory = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    told = []
    for name, option, (soft, hard), least in (
        ("open files", "n", files, LEAST_FILES),
        ("processes", "u", processes, LEAST_PROCESSES),
    ):
        if _is_below(soft, least):
            check = f"limits.{name.replace(' ', '_')}"
            yield warning(
                check, f"{soft} {name} are allowed, but a large job needs {least}", _raise(option, least, hard)
            )
        else:
            told.append(f"{name} {_shown(soft)}")
    locked = f"locked memory {_shown(memory[0], of_bytes=True)}"
    if memory[0] != resource.RLIM_INFINITY and has_adapters(scene):
        text = f"{locked}: InfiniBand and RoCE register memory, which fails beyond this limit"
        fix = (
            "set `* soft memlock unlimited` and `* hard memlock unlimited` in "
            "/etc/security/limits.conf, or LimitMEMLOCK"
        )
        yield fault("limits.locked_memory", text, fix)
    else:
        told.append(locked)
    yield ok("limits.limits", ", ".join(told))


def _is_below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least


def _raise(option: str, least: int, hard: int) -> str:
    command = f"ulimit -{option} {least}"
    return f"{command}, after raising the hard limit of {hard}" if _is_below(hard, least) else command


def _shown(limit: int, of_bytes: bool = False) -> str:
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return size(limit) if of_bytes else f"{limit:,}"
