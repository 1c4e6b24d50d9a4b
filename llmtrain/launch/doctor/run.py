"""Checks this machine, or the hosts of a hostfile."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.launch.disks import LIBAIO
from llmtrain.launch.doctor import comparison
from llmtrain.launch.doctor.all_reduce import CHECK, HostRanks, run_all_reduce
from llmtrain.launch.doctor.channel import Channel, UnreachableError, open_locally, open_over_ssh
from llmtrain.launch.doctor.finding import Finding, fault, listed, ok, warning
from llmtrain.launch.doctor.report import DoctorReport, HostReport
from llmtrain.launch.hostfile import Host
from llmtrain.launch.hosts import forwarded
from llmtrain.recipe import ParallelConfig

CHECK_TIMEOUT_S = 180
"""Longest time in seconds for the checks of a host; each of their programs has a limit of its own."""
CPU_RANKS = 2
"""Ranks of this machine's all-reduce without a GPU, unless given."""
DISK = ("pin_memory", "async_io")
"""Operators for states on disk; the second is linked against the first."""
BUILD_S = 1800
"""Longest time in seconds for one operator; on an idle machine it takes a minute or two."""
PINNED = "DS_PIN_MEMORY_BACKEND"
"""With the value `native`, DeepSpeed pins host memory with an operator of its own."""
Say = Callable[[str], Any]
"""Shows the current activity."""


@dataclass(frozen=True)
class DoctorOptions:
    """What the doctor checks."""

    hosts: tuple[Host, ...] = ()
    """The hosts of a hostfile; without them, this machine."""
    nproc: int | None = None
    """Number of ranks of this machine's all-reduce."""
    seconds: float = 120.0
    """Seconds after which the all-reduce is given up."""
    build: bool = False
    parallel: ParallelConfig | None = None
    """The part of the recipe that operators are built for."""


@dataclass
class _ExaminedHost:
    """A host, and the connection to its agent."""

    report: HostReport
    entry: Host | None
    """Its entry in the hostfile; None for this machine."""
    channel: Channel = field(init=False)
    """Set if it was reached."""

    @property
    def devices(self) -> list[str]:
        """The GPUs that its workers compute on; none if the user chose CPUs, as in training."""
        devices: list[str] = self.report.facts["devices"]
        return [] if os.environ.get("DS_ACCELERATOR") == "cpu" else devices


def examine_hosts(options: DoctorOptions, say: Say) -> DoctorReport:
    """Checks all hosts in parallel, then all of them together."""
    env = forwarded(os.environ, Path.home()) if options.hosts else {}
    hosts = [
        _ExaminedHost(HostReport(entry.name if entry else "this machine", []), entry)
        for entry in options.hosts or (None,)
    ]
    report = DoctorReport([host.report for host in hosts])
    with ExitStack() as stack:
        say("connecting to " + listed([host.report.name for host in hosts]))
        connected = _on_each(hosts, lambda host: _connect(host, env))
        for host in connected:
            stack.callback(host.channel.close)
        say("checking " + (listed([host.report.name for host in connected]) or "nothing"))
        master = _master(connected) if options.hosts else None
        reached = _on_each(connected, lambda host: _check(host, master))
        if options.hosts:
            report.together += _compare(reached)
        if options.build:
            say("compiling DeepSpeed operators, which takes minutes the first time")
            _on_each(reached, lambda host: _build(host, options))
        say("all-reduce over all ranks")
        _all_reduce(report, reached, options, master)
    return report


def _on_each(hosts: list[_ExaminedHost], action: Callable[[_ExaminedHost], object]) -> list[_ExaminedHost]:
    """Runs an action on all hosts in parallel. Returns the hosts that answered; the others get a finding."""

    def answers(host: _ExaminedHost) -> bool:
        try:
            action(host)
        except UnreachableError as error:
            host.report.findings.append(error.finding)
            return False
        return True

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return [host for host, answered in zip(hosts, pool.map(answers, hosts), strict=True) if answered]


def _connect(host: _ExaminedHost, env: Mapping[str, str]) -> None:
    host.channel = open_over_ssh(host.entry.name, env) if host.entry else open_locally()


def _check(host: _ExaminedHost, master: str | None) -> None:
    devices = list(host.entry.devices) if host.entry else []
    root = str(Path("runs").absolute())
    answer = host.channel.request("check", CHECK_TIMEOUT_S, run_root=root, master=master, devices=devices)
    host.report.findings += [Finding.of(finding) for finding in answer["findings"]]
    host.report.facts = answer["facts"]


def _master(connected: list[_ExaminedHost]) -> str | None:
    """Returns the address of rank 0 under DeepSpeed's launcher: the first of the first host."""
    with suppress(UnreachableError, IndexError):
        return str(connected[0].channel.request("addresses", 10)["addresses"][0])
    return None


def _compare(reached: list[_ExaminedHost]) -> list[Finding]:
    skews: dict[str, comparison.Skew] = {}

    def measure_clock(host: _ExaminedHost) -> None:
        skews[host.report.name] = skew = comparison.clock_skew(host.channel)
        host.report.facts["clock"] = asdict(skew)

    _on_each(reached, measure_clock)
    facts = {host.report.name: host.report.facts for host in reached}
    return [*comparison.compare_versions(facts), *comparison.compare_devices(facts), *comparison.compare_clocks(skews)]


def _build(host: _ExaminedHost, options: DoctorOptions) -> None:
    operators = operators_of(options.parallel, os.environ)
    if not operators:
        text = "the recipe needs no compiled operator of DeepSpeed: it uses torch's own optimizers, and no disk"
        host.report.findings.append(ok("prebuild.none", text))
        return
    findings, host.report.built = build_operators(
        host.channel, operators, on_cpu=not host.devices, is_needed=options.parallel is not None
    )
    host.report.findings += findings


def operators_of(parallel: ParallelConfig | None, env: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the operators that training compiles at its start for a recipe; without one, those that any recipe might.

    These are few: the optimizer is torch's own, offloaded or not, and gloo replaces DeepSpeed's shared-memory
    collective.
    """
    if parallel is None:
        return DISK
    offload = {parallel.offload_optimizer, parallel.offload_param}
    if "nvme" in offload:
        return DISK
    return DISK[:1] if "cpu" in offload and env.get(PINNED, "").strip().lower() == "native" else ()


def build_operators(
    channel: Channel, operators: Sequence[str], on_cpu: bool, is_needed: bool
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Builds operators on a host. Returns the findings, and {operator, seconds, file, error} of each operator.

    is_needed: whether a recipe needs them; otherwise a host without libaio is not at fault. Raises UnreachableError.
    """
    channel.send("build", operators=list(operators), accelerator="cpu" if on_cpu else "cuda")
    built = [channel.reply(BUILD_S) for _ in operators]
    return [_build_finding(reply, is_needed) for reply in built], built


def _build_finding(built: Mapping[str, Any], is_needed: bool) -> Finding:
    check, name = f"prebuild.{built['operator']}", built["operator"]
    if "libaio" in built["error"] and not built["seconds"]:
        text = f"{name} was not built; only offload to disk needs it: {built['error']}"
        return fault(check, text, LIBAIO) if is_needed else ok(check, text)
    if built["error"]:
        return fault(check, f"{name} was not built:\n{built['error']}", "see `tools` above: compiler, ninja, libaio")
    return ok(check, f"{name} in {Path(built['file']).parent}, {built['seconds']:.1f} s")


def _all_reduce(report: DoctorReport, reached: list[_ExaminedHost], options: DoctorOptions, master: str | None) -> None:
    missing = [host.name for host in report.hosts if not host.was_reached]
    if missing or not reached:
        text = f"all-reduce not run, since {listed(missing) or 'no host'} could not be checked"
        report.together.append(warning(CHECK, text, "fix that first"))
        return
    if options.hosts and master is None:
        text = f"{reached[0].report.name} has no address that other hosts could reach"
        report.together.append(fault(CHECK, text, "bring an interface up there: `ip address`"))
        return
    counts = [
        len(host.entry.devices) if host.entry else options.nproc or len(host.devices) or CPU_RANKS for host in reached
    ]
    on_cpu = not all(len(host.devices) >= count for host, count in zip(reached, counts, strict=True))
    ranks, start = [], 0
    for host, count in zip(reached, counts, strict=True):
        visible = host.entry.devices if host.entry else ()
        ranks.append(HostRanks(host.channel, range(start, start + count), visible))
        start += count
    finding, report.all_reduce = run_all_reduce(ranks, master or "127.0.0.1", on_cpu, options.seconds)
    report.together.append(finding)
