"""A rank of the doctor's all-reduce: `python -m ... JOB DESCRIPTOR`. Reports its progress in lines of JSON.

Each rank contributes x[i] = i mod 17 + rank, whose sum over n ranks is n (i mod 17) + n (n - 1) / 2: integers, which
fp32 adds exactly in any order.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmtrain.launch.discovery.interfaces import set_interfaces, stay_on_loopback
from llmtrain.launch.discovery.rank import LOOPBACK, Rank

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

MIB_CPU, MIB_GPU = 16, 128
"""MiB of the fp32 tensor whose all-reduce is timed."""
REPEATS, SMALL_REPEATS, WARM_UP = 5, 20, 3
MAX_ERROR_LENGTH = 240
"""Longest error message in characters."""
MAX_REPEATS_S = 4.0
"""Longest time in seconds of all repeats together; a slow network gets fewer, but at least one."""
EXTRA_TIMEOUT_S = 60
"""Seconds by which a rank gives up later than the doctor, since gloo and NCCL would not say which rank is missing."""
EXIT_WAIT_S = 5.0
SMALL = 1
"""Elements of the tensor whose all-reduce measures latency."""


@dataclass(frozen=True)
class AllReduceJob:
    """The instructions for one rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: str
    port: int
    """The port of rank 0; 0 for rank 0 itself, which chooses one."""
    on_cpu: bool
    seconds: float
    """Time after which to give up."""


def main() -> None:
    """Joins the group, reduces, checks the result and measures."""
    job = AllReduceJob(**json.loads(sys.argv[1]))
    with os.fdopen(int(sys.argv[2]), "w") as replies:

        def report(state: str, **fields: Any) -> None:
            replies.write(json.dumps({"rank": job.rank, "state": state, **fields}) + "\n")
            replies.flush()

        report("started")
        try:
            _run(job, report)
        except Exception as error:
            report("failed", error=f"{type(error).__name__}: {str(error)[:MAX_ERROR_LENGTH]}".splitlines()[0])
        # Tearing down a group while another rank still works only prints noise.
        os._exit(0)


def _run(job: AllReduceJob, report: Callable[..., None]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    from torch import distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    rank = Rank(job.rank, job.local_rank, job.world_size, job.local_world_size, job.master, job.port, "doctor")
    interfaces = set_interfaces(rank, job.on_cpu).lines
    if rank.on_one_machine:
        stay_on_loopback()
    limit = datetime.timedelta(seconds=job.seconds + EXTRA_TIMEOUT_S)
    is_main = job.rank == 0
    listener = None
    if is_main and rank.on_one_machine:
        listener = socket.create_server((LOOPBACK, 0))
        job = replace(job, port=listener.getsockname()[1])
    descriptor = listener.detach() if listener else None
    rendezvous = (job.master, job.port, job.world_size, is_main, limit)
    store = TCPStore(*rendezvous, wait_for_workers=False, master_listen_fd=descriptor)
    report("connected", port=store.port, interfaces=interfaces)
    device = torch.device("cpu") if job.on_cpu else torch.device("cuda", job.local_rank)
    if not job.on_cpu:
        torch.cuda.set_device(device)
    backend = "gloo" if job.on_cpu else "nccl"
    dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world_size, timeout=limit)
    small = _timed(torch.zeros(SMALL, device=device), SMALL_REPEATS, device)
    report("joined")
    count = (MIB_CPU if job.on_cpu else MIB_GPU) * 2**20 // 4
    wrong = _count_wrong(count, job, device)
    large = _timed(torch.zeros(count, device=device), _repeats(count, device), device)
    report("done", backend=backend, wrong=wrong, bytes=count * 4, seconds=large, latency_s=small)
    _wait_for_all(store, job.world_size)


def _wait_for_all(store: TCPStore, world_size: int) -> None:
    """Waits for all ranks.

    A rank that ends while another still reads from it, or needs the store of rank 0, would break the other one.
    """
    deadline = time.monotonic() + EXIT_WAIT_S
    with suppress(Exception):  # a late rank has already reported its results
        store.add("over", 1)
        while store.add("over", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.02)


def _count_wrong(count: int, job: AllReduceJob, device: torch.device) -> int:
    """Returns the number of wrong elements of the sum."""
    import torch
    from torch import distributed as dist

    pattern = torch.arange(count, device=device).remainder_(17).float()
    total = pattern + job.rank
    dist.all_reduce(total)
    n = job.world_size
    return int((total != pattern * n + n * (n - 1) / 2).sum())


def _repeats(count: int, device: torch.device) -> int:
    """Returns the number of repeats that all ranks have time for, the same on all of them."""
    import torch
    from torch import distributed as dist

    seconds = torch.tensor(_timed(torch.zeros(count, device=device), 1, device), device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return max(1, min(REPEATS, int(MAX_REPEATS_S / max(seconds.item(), 1e-9))))


def _timed(tensor: torch.Tensor, repeats: int, device: torch.device) -> float:
    """Returns the median seconds of an all-reduce; warm-up runs are not counted."""
    import torch
    from torch import distributed as dist

    seconds = []
    for _ in range(repeats + (WARM_UP if repeats > 1 else 0)):
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[-repeats:])


if __name__ == "__main__":
    main()
