"""Resource limits of the kernel for a process, shared memory, and the folders that a run writes to."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llmtrain.launch.disks import nearest_existing
from llmtrain.launch.doctor.finding import Finding, HostContext, fault, ok, warning
from llmtrain.system.quantities import readable_bytes
from llmtrain.system.untrusted import expanded

MIN_OPEN_FILES = 4096
"""File descriptors: connections to other ranks, data files, and those of libraries."""
MIN_PROCESSES = 4096
"""Processes and threads of one user: each worker has dozens."""


def limits(context: HostContext) -> Iterator[Finding]:
    """Checks nofile, memlock and nproc, as this process has inherited them."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)
    memory = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    lines = []
    for name, option, (soft, hard), minimum in (
        ("open files", "n", files, MIN_OPEN_FILES),
        ("processes", "u", processes, MIN_PROCESSES),
    ):
        if _is_below(soft, minimum):
            check = f"limits.{name.replace(' ', '_')}"
            yield warning(
                check, f"{soft} {name} are allowed, but a large job needs {minimum}", _raise(option, minimum, hard)
            )
        else:
            lines.append(f"{name} {_readable(soft)}")
    locked = f"locked memory {_readable(memory[0], of_bytes=True)}"
    if memory[0] != resource.RLIM_INFINITY and any((context.sys / "class" / "infiniband").glob("*")):
        text = f"{locked}: InfiniBand and RoCE register memory, which fails beyond this limit"
        fix = (
            "set `* soft memlock unlimited` and `* hard memlock unlimited` in "
            "/etc/security/limits.conf, or LimitMEMLOCK"
        )
        yield fault("limits.locked_memory", text, fix)
    else:
        lines.append(locked)
    yield ok("limits.limits", ", ".join(lines))


def _is_below(limit: int, minimum: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < minimum


def _raise(option: str, minimum: int, hard: int) -> str:
    command = f"ulimit -{option} {minimum}"
    return f"{command}, after raising the hard limit of {hard}" if _is_below(hard, minimum) else command


def _readable(limit: int, of_bytes: bool = False) -> str:
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return readable_bytes(limit) if of_bytes else f"{limit:,}"


SHARED = Path("/dev/shm")
MIN_SHARED_BYTES = 2**30
"""Bytes. NCCL needs tens of MB for each pair of GPUs of a host, and containers have 64 MiB by default."""
MIN_FREE_BYTES = 2**30
"""Bytes that should be free in a folder that a run writes to."""


def shared_memory(context: HostContext) -> Iterator[Finding]:
    """Checks /dev/shm, through which workers of one host communicate."""
    if not SHARED.is_dir():
        yield fault("storage.shm", f"{SHARED} does not exist", f"mount -t tmpfs tmpfs {SHARED}")
        return
    usage = shutil.disk_usage(SHARED)
    refusal = write_refusal(SHARED)
    if refusal:
        yield fault(
            "storage.shm", f"{SHARED} cannot be written to: {refusal}", f"`ls -ld {SHARED}`; its mode should be 1777"
        )
    elif usage.free < MIN_SHARED_BYTES:
        sizes = f"{readable_bytes(usage.free)} free of {readable_bytes(usage.total)}"
        text = f"{SHARED} has {sizes}, which may be too little for NCCL"
        yield warning("storage.shm", text, f"`docker run --shm-size=8g`, or mount -o remount,size=8g {SHARED}")
    else:
        yield ok("storage.shm", f"{SHARED} {readable_bytes(usage.free)} free of {readable_bytes(usage.total)}")


def folders(context: HostContext) -> Iterator[Finding]:
    """Checks the folders that a run writes to, by writing to each."""
    checked = (
        ("runs", context.run_root, "--run-dir FOLDER"),
        ("cache", context.cache, "export LLMTRAIN_CACHE=FOLDER"),
        ("temporary files", Path(context.env.get("TMPDIR") or tempfile.gettempdir()), "export TMPDIR=FOLDER"),
        ("Hugging Face", _hugging_face(context), "export HF_HOME=FOLDER"),
    )
    for what, folder, fix in checked:
        yield _folder_finding(what, folder, fix)


def write_refusal(folder: Path) -> str:
    """Returns why a folder cannot be written to, or an empty string. Leaves nothing behind."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 65536)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _folder_finding(what: str, folder: Path, fix: str) -> Finding:
    check, existing = f"storage.{what.replace(' ', '_')}", nearest_existing(expanded(str(folder)))
    if not existing.is_dir():
        return fault(check, f"{what}: {folder} is below a file, {existing}", fix)
    refusal = write_refusal(existing)
    if refusal:
        return fault(check, f"{what}: {existing} cannot be written to: {refusal}", fix)
    free = shutil.disk_usage(existing).free
    if free < MIN_FREE_BYTES:
        return warning(check, f"{what}: {readable_bytes(free)} are free in {existing}", f"free some space, or {fix}")
    return ok(check, f"{what}: {folder}, {readable_bytes(free)} free")


def _hugging_face(context: HostContext) -> Path:
    caches = Path(context.env.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(context.env.get("HF_HOME") or caches / "huggingface")
