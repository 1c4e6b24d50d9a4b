"""Tests a small all-reduce over all ranks: whether all ranks join, whether the sum is right, and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from llmtrain.launch.doctor.finding import CheckResult, fault, listed, ok
from llmtrain.launch.doctor.reach import Channel

CHECK = "all_reduce"
FORMULA = "2 (n - 1) / n × bytes / s"
"""Bus bandwidth: each of n ranks sends and receives this multiple of the reduced bytes (as in NVIDIA's nccl-tests)."""
POLL_S = 0.05
GRACE_S = 2.0
"""Seconds for the others to report their state after a rank has failed."""
MOST_NAMED = 16
"""Number of ranks that a line lists."""
WAITING_FOR = {
    "asked": "did not start",
    "started": "started, but did not reach rank 0",
    "met": "reached rank 0, but not all others",
    "joined": "reached all others, but the large all-reduce did not end",
}
"""Last state of a rank → its meaning."""


@dataclass
class Place:
    """The ranks of one host."""

    channel: Channel
    ranks: range
    visible: tuple[int, ...] = ()
    """Devices in the hostfile; empty for all."""


@dataclass
class AllReduceProgress:
    """The state of each rank."""

    at: dict[int, str]
    reported: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The measurements of each rank."""
    failed: dict[int, str] = field(default_factory=dict)
    port: int = 0
    interfaces: dict[int, list[str]] = field(default_factory=dict)

    def note(self, reply: Mapping[str, Any]) -> None:
        """Processes a line from a rank."""
        rank, at = reply["rank"], reply["at"]
        if at == "ended":
            if self.at[rank] not in ("done", "failed"):
                code = reply["code"]
                said = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                self.at[rank], self.failed[rank] = "failed", said
            return
        self.at[rank] = at
        if at == "met":
            self.interfaces[rank] = reply["interfaces"]
            self.port = reply["port"] if rank == 0 else self.port
        elif at == "failed":
            self.failed[rank] = reply["error"]
        elif at == "done":
            self.reported[rank] = dict(reply)

    @property
    def is_over(self) -> bool:
        """Whether no more lines will come."""
        return all(at in ("done", "failed") for at in self.at.values())


def reduce_over(
    places: Sequence[Place], master: str, on_cpu: bool, seconds: float
) -> tuple[CheckResult, dict[str, Any]]:
    """Runs the all-reduce within `seconds`.

    Returns the finding and the measurement, which is empty without a result.
    """
    world = sum(len(place.ranks) for place in places)
    progress = AllReduceProgress(dict.fromkeys(range(world), "asked"))
    deadline = time.monotonic() + seconds
    first = places[0]
    first.channel.send("ranks", ranks=[_job(first, 0, world, master, 0, on_cpu, seconds)])
    while not progress.port and not progress.is_over and 0 not in progress.failed and time.monotonic() < deadline:
        _poll(places, progress)
    if progress.port:
        for place in places:
            jobs = [_job(place, rank, world, master, progress.port, on_cpu, seconds) for rank in place.ranks if rank]
            place.channel.send("ranks", ranks=jobs)
        while not progress.is_over and time.monotonic() < deadline:
            if progress.failed:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            _poll(places, progress)
    return _judge(places, progress, on_cpu, seconds)


def bus_bandwidth(ranks: int, count: int, seconds: float) -> float:
    """Returns bytes per second by `FORMULA`. count: bytes that each rank reduces."""
    return 2 * (ranks - 1) / ranks * count / seconds


def _job(place: Place, rank: int, world: int, master: str, port: int, on_cpu: bool, seconds: float) -> dict[str, Any]:
    job = {
        "rank": rank,
        "world_size": world,
        "local_rank": rank - place.ranks.start,
        "local_world_size": len(place.ranks),
        "master": master,
        "port": port,
        "on_cpu": on_cpu,
        "seconds": seconds,
    }
    return job | ({"visible": ",".join(map(str, place.visible))} if place.visible and not on_cpu else {})


def _poll(places: Sequence[Place], progress: AllReduceProgress) -> None:
    for place in places:
        try:
            reply = place.channel.next(POLL_S / len(places))
        except Empty:
            continue
        if reply is None:
            for rank in place.ranks:
                if progress.at[rank] not in ("done", "failed"):
                    progress.at[rank], progress.failed[rank] = "failed", "the connection to its host was lost"
        elif "rank" in reply:
            progress.note(reply)


def _judge(
    places: Sequence[Place], progress: AllReduceProgress, on_cpu: bool, seconds: float
) -> tuple[CheckResult, dict[str, Any]]:
    names = {rank: place.channel.name for place in places for rank in place.ranks}
    if progress.failed or not progress.is_over:
        return _failure(progress, names, on_cpu, seconds), {}
    wrong = [rank for rank, reported in progress.reported.items() if reported["wrong"]]
    if wrong:
        text = f"wrong sums on ranks {', '.join(f'{rank} ({names[rank]})' for rank in wrong)}"
        return fault(CHECK, text, "a device, a cable or memory is faulty: leave that host out and check its logs"), {}
    world = len(names)
    slowest, latency = (
        max(reported[key] for reported in progress.reported.values()) for key in ("seconds", "latency_s")
    )
    count, backend = progress.reported[0]["bytes"], progress.reported[0]["backend"]
    measured = {
        "ranks": world,
        "backend": backend,
        "correct": True,
        "bytes": count,
        "seconds": slowest,
        "latency_s": latency,
        "formula": FORMULA,
        "bus_bytes_per_second": bus_bandwidth(world, count, slowest),
        "interfaces": {str(rank): lines for rank, lines in sorted(progress.interfaces.items()) if lines},
    }
    if world == 1:
        return ok(CHECK, f"one rank, {backend}: correct; no link was used"), measured
    bandwidth = measured["bus_bytes_per_second"] / 1e9
    text = f"{world} ranks, {backend}: correct; {count / 2**20:.0f} MiB in {_time(slowest)},"
    text += f" bus bandwidth {bandwidth:.3g} GB/s ({FORMULA}); latency {_time(latency)}"
    return ok(CHECK, text), measured


def _failure(progress: AllReduceProgress, names: Mapping[int, str], on_cpu: bool, seconds: float) -> CheckResult:
    failed = [f"rank {rank} ({names[rank]}): {said}" for rank, said in sorted(progress.failed.items())]
    late: dict[str, list[str]] = {}
    for rank, at in progress.at.items():
        if at not in ("done", "failed"):
            late.setdefault(at, []).append(f"{rank} ({names[rank]})")
    silent = [f"ranks {_some(ranks)}: {WAITING_FOR[at]}" for at, ranks in late.items()]
    what = "; ".join([*failed, *silent])
    if not failed:
        what = f"not finished after {seconds:.0f} s: {what}"
    known = sorted({line for lines in progress.interfaces.values() for line in lines})
    used = f" ({'; '.join(known)})" if known else ""
    variable = "GLOO_SOCKET_IFNAME" if on_cpu else "NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO logs more"
    fix = "check `free -m`, `nvidia-smi` and `dmesg | tail` there"
    if len(set(names.values())) > 1:
        fix = f"check for a firewall between the hosts, or choose another interface with {variable}"
    return fault(CHECK, what + used, fix)


def _some(ranks: list[str]) -> str:
    return listed(ranks if len(ranks) <= MOST_NAMED else [*ranks[:MOST_NAMED], f"{len(ranks) - MOST_NAMED} more"])


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"
