"""All findings of the doctor, as data and as lines for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from llmtrain.launch.doctor.finding import Finding, listed

STYLES = {"warning": "yellow", "fault": "bold red"}
"""Level of a problem → style, in the order in which they are shown."""


@dataclass
class HostReport:
    """The findings of one host."""

    name: str
    findings: list[Finding]
    facts: dict[str, Any] = field(default_factory=dict)
    built: list[dict[str, Any]] = field(default_factory=list)

    @property
    def was_reached(self) -> bool:
        """Whether it could be checked."""
        return bool(self.facts)


@dataclass
class DoctorReport:
    """The findings of all hosts, and the measured all-reduce."""

    hosts: list[HostReport]
    together: list[Finding] = field(default_factory=list)
    """Findings about all hosts and ranks together."""
    all_reduce: dict[str, Any] = field(default_factory=dict)

    def of_level(self, level: str) -> list[tuple[str, Finding]]:
        """Returns (host or "", finding) for the findings of a level."""
        of_hosts = [(host.name, finding) for host in self.hosts for finding in host.findings]
        findings = [*of_hosts, *(("", finding) for finding in self.together)]
        return [(name, finding) for name, finding in findings if finding.level == level]

    def document(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {
            "faults": len(self.of_level("fault")),
            "warnings": len(self.of_level("warning")),
            "hosts": [
                {
                    "host": host.name,
                    "reached": host.was_reached,
                    "findings": [finding.as_dict() for finding in host.findings],
                    "facts": host.facts,
                    "prebuilt": host.built,
                }
                for host in self.hosts
            ],
            "together": [finding.as_dict() for finding in self.together],
            "all_reduce": self.all_reduce or None,
        }


def show(report: DoctorReport, console: Console) -> None:
    """Prints what is in order by group, then warnings, then faults, each with its fix.

    Findings that all hosts share are printed once, others with their hosts.
    """

    def show_line(*parts: str | tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), soft_wrap=True)

    hosts: dict[Finding, list[str]] = {}
    for host in report.hosts:
        for finding in host.findings:
            hosts.setdefault(finding, []).append(host.name)
    hosts |= {finding: [] for finding in report.together}
    reached = [host.name for host in report.hosts if host.was_reached]
    if reached:
        show_line((f"{len(reached)} hosts: " * (len(reached) > 1) + ", ".join(reached), "bold"))
    for group in dict.fromkeys(finding.group for finding in hosts):
        of_group = [finding for finding in hosts if finding.group == group and finding.level == "ok"]
        texts = [_of_hosts(finding, hosts[finding], reached) for finding in of_group]
        labels = [group.replace("_", "-"), *[""] * len(texts)]
        for label, text in zip(labels, texts or ["see below"], strict=False):
            show_line("  ", (f"{label:<14}", "cyan"), text)
    for level, style in STYLES.items():
        of_level = [finding for finding in hosts if finding.level == level]
        if of_level:
            console.print()
        for finding in of_level:
            show_line((f"{level}: {_of_hosts(finding, hosts[finding], reached)} [{finding.check}]", style))
            show_line(f"    {finding.fix}")
    console.print()
    levels = [finding.level for finding in hosts]
    show_line(f"faults: {levels.count('fault')}, warnings: {levels.count('warning')}")


def _of_hosts(finding: Finding, hosts: list[str], reached: list[str]) -> str:
    """Returns the text of a finding after the hosts that have it, unless all have it or it names its host itself."""
    if not hosts or hosts == reached or finding.text.startswith(f"{hosts[0]}: "):
        return finding.text
    return f"{listed(hosts)}: {finding.text}"
