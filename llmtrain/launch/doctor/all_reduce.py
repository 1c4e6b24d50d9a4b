"""Tests a small all-reduce over all ranks: whether all ranks join, whether the sum is right, and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from llmtrain.launch.doctor.channel import Channel
from llmtrain.launch.doctor.finding import Finding, fault, listed, ok, readable_seconds

CHECK = "all_reduce"
FORMULA = "2 (n - 1) / n × bytes / s"
"""Bus bandwidth: each of n ranks sends and receives this multiple of the reduced bytes (as in NVIDIA's nccl-tests)."""
POLL_S = 0.05
GRACE_S = 2.0
"""Seconds for the others to report their state after a rank has failed."""
STATE_DESCRIPTIONS = {
    "requested": "did not start",
    "started": "started, but did not reach rank 0",
    "connected": "reached rank 0, but not all others",
    "joined": "reached all others, but the large all-reduce did not end",
}
"""Last state of a rank → its meaning."""


@dataclass
class HostRanks:
    """The ranks of one host."""

    channel: Channel
    ranks: range
    visible: tuple[int, ...] = ()
    """Devices in the hostfile; empty for all."""


@dataclass
class AllReduceProgress:
    """The state of each rank."""

    states: dict[int, str]
    reported: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The measurements of each rank."""
    failed: dict[int, str] = field(default_factory=dict)
    port: int = 0
    interfaces: dict[int, list[str]] = field(default_factory=dict)

    def update(self, reply: Mapping[str, Any]) -> None:
        """Processes a line from a rank."""
        rank, state = reply["rank"], reply["state"]
        if state == "ended":
            if self.states[rank] not in ("done", "failed"):
                code = reply["code"]
                failure = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                self.states[rank], self.failed[rank] = "failed", failure
            return
        self.states[rank] = state
        if state == "connected":
            self.interfaces[rank] = reply["interfaces"]
            self.port = reply["port"] if rank == 0 else self.port
        elif state == "failed":
            self.failed[rank] = reply["error"]
        elif state == "done":
            self.reported[rank] = dict(reply)

    @property
    def is_over(self) -> bool:
        """Whether no more lines will come."""
        return all(state in ("done", "failed") for state in self.states.values())


def run_all_reduce(
    hosts: Sequence[HostRanks], master: str, on_cpu: bool, seconds: float
) -> tuple[Finding, dict[str, Any]]:
    """Runs the all-reduce within `seconds`.

    Returns the finding and the measurement, which is empty without a result.
    """
    world = sum(len(host.ranks) for host in hosts)
    progress = AllReduceProgress(dict.fromkeys(range(world), "requested"))
    deadline = time.monotonic() + seconds
    first = hosts[0]
    first.channel.send("ranks", ranks=[_job(first, 0, world, master, 0, on_cpu, seconds)])
    while not progress.port and not progress.is_over and 0 not in progress.failed and time.monotonic() < deadline:
        _poll(hosts, progress)
    if progress.port:
        for host in hosts:
            jobs = [_job(host, rank, world, master, progress.port, on_cpu, seconds) for rank in host.ranks if rank]
            host.channel.send("ranks", ranks=jobs)
        while not progress.is_over and time.monotonic() < deadline:
            if progress.failed:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            _poll(hosts, progress)
    return _result(hosts, progress, on_cpu, seconds)


def bus_bandwidth(ranks: int, count: int, seconds: float) -> float:
    """Returns bytes per second by `FORMULA`. count: bytes that each rank reduces."""
    return 2 * (ranks - 1) / ranks * count / seconds


def _job(
    host: HostRanks, rank: int, world: int, master: str, port: int, on_cpu: bool, seconds: float
) -> dict[str, Any]:
    job = {
        "rank": rank,
        "world_size": world,
        "local_rank": rank - host.ranks.start,
        "local_world_size": len(host.ranks),
        "master": master,
        "port": port,
        "on_cpu": on_cpu,
        "seconds": seconds,
    }
    return job | ({"visible": ",".join(map(str, host.visible))} if host.visible and not on_cpu else {})


def _poll(hosts: Sequence[HostRanks], progress: AllReduceProgress) -> None:
    for host in hosts:
        try:
            reply = host.channel.next(POLL_S / len(hosts))
        except Empty:
            continue
        if reply is None:
            for rank in host.ranks:
                if progress.states[rank] not in ("done", "failed"):
                    progress.states[rank], progress.failed[rank] = "failed", "the connection to its host was lost"
        elif "rank" in reply:
            progress.update(reply)


def _result(
    hosts: Sequence[HostRanks], progress: AllReduceProgress, on_cpu: bool, seconds: float
) -> tuple[Finding, dict[str, Any]]:
    names = {rank: host.channel.name for host in hosts for rank in host.ranks}
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
    text = f"{world} ranks, {backend}: correct; {count / 2**20:.0f} MiB in {readable_seconds(slowest)},"
    text += f" bus bandwidth {bandwidth:.3g} GB/s ({FORMULA}); latency {readable_seconds(latency)}"
    return ok(CHECK, text), measured


def _failure(progress: AllReduceProgress, names: Mapping[int, str], on_cpu: bool, seconds: float) -> Finding:
    failed = [f"rank {rank} ({names[rank]}): {failure}" for rank, failure in sorted(progress.failed.items())]
    late: dict[str, list[str]] = {}
    for rank, state in progress.states.items():
        if state not in ("done", "failed"):
            late.setdefault(state, []).append(f"{rank} ({names[rank]})")
    silent = [f"ranks {listed(ranks)}: {STATE_DESCRIPTIONS[state]}" for state, ranks in late.items()]
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
