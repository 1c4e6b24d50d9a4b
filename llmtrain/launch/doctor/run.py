"""Examines this machine, or the hosts of a hostfile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.launch.doctor import prebuild, reach, together
from llmtrain.launch.doctor.all_reduce import CHECK, Place, reduce_over
from llmtrain.launch.doctor.finding import CheckResult, caution, fault, listed, ok
from llmtrain.launch.doctor.reach import Channel, UnreachableError
from llmtrain.launch.doctor.report import DoctorReport, HostReport
from llmtrain.launch.hostfile import Host
from llmtrain.recipe import ParallelConfig

LOOK_S = 180
"""Longest time in seconds for the checks of a host; each of their programs has a limit of its own."""
CPU_RANKS = 2
"""Ranks of this machine's all-reduce without a GPU, unless given."""
Say = Callable[[str], Any]
"""Shows the current activity."""


@dataclass(frozen=True)
class Visit:
    """A request to the doctor."""

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
class _Patient:
    """A host that was reached."""

    report: HostReport
    channel: Channel
    host: Host | None = None

    @property
    def devices(self) -> list[str]:
        """The GPUs that its workers compute on; none if the user chose CPUs, as in training."""
        found: list[str] = self.report.facts["devices"]
        return [] if os.environ.get("DS_ACCELERATOR") == "cpu" else found


def examine_hosts(visit: Visit, say: Say) -> DoctorReport:
    """Checks all hosts in parallel, then all of them together."""
    with _agents(visit, say) as (patients, lost):
        say("checking " + (listed([one.report.name for one in patients]) or "nothing"))
        master = _master(patients) if visit.hosts else None
        with ThreadPoolExecutor(max(1, len(patients))) as pool:
            list(pool.map(lambda patient: _look(patient, master), patients))
        reached = [patient for patient in patients if patient.report.was_reached]
        order = {host.name: number for number, host in enumerate(visit.hosts)}
        report = DoctorReport(
            sorted([*(one.report for one in patients), *lost], key=lambda one: order.get(one.name, 0))
        )
        if visit.hosts:
            report.together += _compare(reached)
        if visit.build:
            say("compiling DeepSpeed operators, which takes minutes the first time")
            with ThreadPoolExecutor(max(1, len(reached))) as pool:
                list(pool.map(lambda patient: _build(patient, visit), reached))
        say("all-reduce over all ranks")
        _all_reduce(report, reached, visit, master)
        return report


@contextmanager
def _agents(visit: Visit, say: Say) -> Iterator[tuple[list[_Patient], list[HostReport]]]:
    """Starts an agent on each host that answers; yields them and the reports of the other hosts."""
    with ExitStack() as undo:
        if not visit.hosts:
            channel = reach.beside()
            undo.callback(channel.close)
            yield [_Patient(HostReport("this machine", []), channel)], []
            return
        from llmtrain.launch.hosts import forwarded

        env = forwarded(os.environ, Path.home())
        say(f"reaching {len(visit.hosts)} hosts by ssh")
        with ThreadPoolExecutor(len(visit.hosts)) as pool:
            answers = list(pool.map(lambda host: _reach(host, env), visit.hosts))
        patients, lost = [], []
        for host, answer in zip(visit.hosts, answers, strict=True):
            if isinstance(answer, CheckResult):
                lost.append(HostReport(host.name, [answer]))
            else:
                undo.callback(answer.close)
                patients.append(_Patient(HostReport(host.name, []), answer, host))
        yield patients, lost


def _reach(host: Host, env: dict[str, str]) -> Channel | CheckResult:
    try:
        return reach.over_ssh(host.name, env)
    except UnreachableError as error:
        return error.finding


def _look(patient: _Patient, master: str | None) -> None:
    devices = list(patient.host.devices) if patient.host else []
    root = str(Path("runs").absolute())
    try:
        answer = patient.channel.ask("look", LOOK_S, run_root=root, master=master, devices=devices)
    except UnreachableError as error:
        patient.report.findings.append(error.finding)
        return
    patient.report.findings += [CheckResult.of(one) for one in answer["findings"]]
    patient.report.facts = answer["facts"]


def _master(patients: list[_Patient]) -> str | None:
    """Returns the address of rank 0 under DeepSpeed's launcher: the first of the first host."""
    if not patients:
        return None
    try:
        addresses: list[str] = patients[0].channel.ask("addresses", 10)["addresses"]
    except UnreachableError:
        return None
    return addresses[0] if addresses else None


def _compare(reached: list[_Patient]) -> list[CheckResult]:
    facts = {patient.report.name: patient.report.facts for patient in reached}
    skews = {}
    for patient in reached:
        try:
            skews[patient.report.name] = together.clock_skew(patient.channel)
        except UnreachableError as error:
            patient.report.findings.append(error.finding)
    for name, skew in skews.items():
        facts[name]["clock"] = {"ahead_s": skew.ahead_s, "uncertainty_s": skew.uncertainty_s}
    return [*together.versions(facts), *together.devices(facts), *together.clocks(skews)]


def _build(patient: _Patient, visit: Visit) -> None:
    operators = prebuild.operators_of(visit.parallel, os.environ)
    if not operators:
        text = "the recipe needs no compiled operator of DeepSpeed: it uses torch's own optimizers, and no disk"
        patient.report.findings.append(ok("prebuild.none", text))
        return
    try:
        findings, patient.report.built = prebuild.build_operators(
            patient.channel, operators, on_cpu=not patient.devices, is_needed=visit.parallel is not None
        )
        patient.report.findings += findings
    except UnreachableError as error:
        patient.report.findings.append(error.finding)


def _all_reduce(report: DoctorReport, reached: list[_Patient], visit: Visit, master: str | None) -> None:
    missing = [host.name for host in report.hosts if not host.was_reached]
    if missing or not reached:
        text = f"all-reduce not run, since {listed(missing) or 'no host'} could not be checked"
        report.together.append(caution(CHECK, text, "fix that first"))
        return
    if visit.hosts and master is None:
        text = f"{reached[0].report.name} has no address that other hosts could reach"
        report.together.append(fault(CHECK, text, "bring an interface up there: `ip address`"))
        return
    counts = [len(one.host.devices) if one.host else visit.nproc or len(one.devices) or CPU_RANKS for one in reached]
    on_cpu = not all(len(one.devices) >= count for one, count in zip(reached, counts, strict=True))
    places, start = [], 0
    for patient, count in zip(reached, counts, strict=True):
        visible = patient.host.devices if patient.host else ()
        places.append(Place(patient.channel, range(start, start + count), visible))
        start += count
    finding, report.all_reduce = reduce_over(places, master or "127.0.0.1", on_cpu, visit.seconds)
    report.together.append(finding)
