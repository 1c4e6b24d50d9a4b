"""Compares hosts with each other: versions, devices, clocks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.launch.doctor.channel import Channel
from llmtrain.launch.doctor.finding import Finding, fault, listed, ok, readable_seconds, warning

PINGS = 7
SKEW_S = 1.0
"""Seconds. The clocks of the hosts determine which rank failed first."""


@dataclass(frozen=True)
class Skew:
    """The seconds by which a host's clock is ahead of ours, and the uncertainty."""

    ahead_s: float
    uncertainty_s: float


def clock_skew(channel: Channel) -> Skew:
    """Measures the skew with the fastest of several round trips.

    The host's time is taken in the middle of it, plus or minus half of it.
    """
    best: Skew | None = None
    for _ in range(PINGS):
        started, sent = time.monotonic(), time.time()
        host_time = channel.request("clock", 10)["time"]
        trip = time.monotonic() - started
        if best is None or trip / 2 < best.uncertainty_s:
            best = Skew(host_time - sent - trip / 2, trip / 2)
    assert best is not None
    return best


def compare_versions(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Reports all differing versions in one line. facts: host → what its agent reports."""
    if len(facts) < 2:
        return
    names = sorted({name for of_host in facts.values() for name in of_host["versions"]})
    parts = []
    for name in names:
        groups = _by_value({host: of_host["versions"].get(name, "missing") for host, of_host in facts.items()})
        if len(groups) > 1:
            parts.append(f"{name} {', '.join(f'{value} on {listed(hosts)}' for value, hosts in groups)}")
    if parts:
        yield fault("hosts.versions", f"versions differ: {'; '.join(parts)}", "install the same everywhere")
    else:
        yield ok("hosts.versions", f"{len(facts)} hosts have the same Python, packages and llmtrain")


def compare_devices(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Reports whether hosts have different devices."""
    groups = _by_value({host: " + ".join(sorted(of_host["devices"])) or "no GPU" for host, of_host in facts.items()})
    if len(groups) > 1:
        text = "; ".join(f"{value} on {listed(hosts)}" for value, hosts in groups)
        yield warning("hosts.devices", f"devices differ: {text}", "the slowest sets the pace; see --include")


def compare_clocks(skews: Mapping[str, Skew]) -> Iterator[Finding]:
    """Reports clocks that differ by more than the round trip explains."""
    if len(skews) < 2:
        return
    ahead = max(skews, key=lambda host: skews[host].ahead_s)
    behind = min(skews, key=lambda host: skews[host].ahead_s)
    difference = skews[ahead].ahead_s - skews[behind].ahead_s
    uncertainty = skews[ahead].uncertainty_s + skews[behind].uncertainty_s
    if difference - uncertainty > SKEW_S:
        apart = f"{readable_seconds(difference)} apart (± {readable_seconds(uncertainty)})"
        text = f"clocks are {apart}, {ahead} ahead of {behind}"
        fix = "run chrony or ntpd on all hosts; their clocks determine which rank failed first"
        yield warning("hosts.clocks", text, fix)
    else:
        yield ok("hosts.clocks", f"clocks agree within {readable_seconds(difference + uncertainty)}")


def _by_value(values: Mapping[str, str]) -> list[tuple[str, Sequence[str]]]:
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    return sorted(groups.items(), key=lambda group: -len(group[1]))
