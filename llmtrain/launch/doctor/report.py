"""All findings of the doctor, as data and as lines for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from llmtrain.launch.doctor.finding import Finding

STYLES = {"warning": "yellow", "fault": "bold red"}
MARGIN = 2
LABEL = 14
"""Characters before the text of a finding."""
MAX_NAMED = 8
"""Number of hosts that a line lists."""


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
    width = console.width if console.is_terminal else None
    rows = _rows(report)
    reached = tuple(host.name for host in report.hosts if host.was_reached)
    if reached:
        several = f"{len(reached)} hosts: " if len(reached) > 1 else ""
        _print(console, _wrapped(several + ", ".join(reached), width, 0, MARGIN), "bold")
    for line in _groups(rows, reached, width):
        console.print(line, soft_wrap=True)
    for level in ("warning", "fault"):
        of_level = [row for row in rows if row.finding.level == level]
        if of_level:
            console.print()
        for row in of_level:
            where = f"{_named(row.hosts)}: " if row.hosts and len(report.hosts) > 1 and not row.names_its_host else ""
            text = f"{level}: {where}{row.finding.text} [{row.finding.check}]"
            _print(console, _wrapped(text, width, 0, 4), STYLES[level])
            _print(console, _wrapped(row.finding.fix, width, 4, 4))
    console.print()
    _print(console, [_verdict([row.finding.level for row in rows])])


@dataclass(frozen=True)
class _Row:
    """A finding, and the hosts that have it; none if it concerns all together."""

    finding: Finding
    hosts: tuple[str, ...]

    @property
    def names_its_host(self) -> bool:
        """Whether the text begins with the host's name."""
        return self.finding.text.startswith(f"{self.hosts[0]}: ")


def _rows(report: DoctorReport) -> list[_Row]:
    """Returns each finding once, group by group."""
    hosts: dict[Finding, list[str]] = {}
    for host in report.hosts:
        for finding in host.findings:
            hosts.setdefault(finding, []).append(host.name)
    hosts |= {finding: [] for finding in report.together}
    order = list(dict.fromkeys(finding.group for finding in hosts))
    rows = [_Row(finding, tuple(names)) for finding, names in hosts.items()]
    return sorted(rows, key=lambda row: order.index(row.finding.group))


def _groups(rows: list[_Row], reached: tuple[str, ...], width: int | None) -> Iterator[Text]:
    """Yields lines of what is in order, each group labelled once; a group with problems only refers to the end."""
    labelled = ""
    for group in dict.fromkeys(row.finding.group for row in rows):
        members = [row for row in rows if row.finding.group == group]
        lines = [
            (f"{_named(row.hosts)}: " if row.hosts and row.hosts != reached else "") + row.finding.text
            for row in members
            if row.finding.level == "ok"
        ]
        for text in lines or ["see below"]:
            label = "" if group == labelled else group.replace("_", "-")
            labelled = group
            first, *more = _wrapped(text, width, MARGIN + LABEL, MARGIN + LABEL)
            yield Text.assemble(" " * MARGIN, (f"{label:<{LABEL}}", "cyan"), first.lstrip())
            yield from map(Text, more)


def _named(hosts: tuple[str, ...]) -> str:
    return (
        ", ".join(hosts)
        if len(hosts) <= MAX_NAMED
        else f"{', '.join(hosts[:MAX_NAMED])} and {len(hosts) - MAX_NAMED} more"
    )


def _print(console: Console, lines: list[str], style: str = "") -> None:
    for line in lines:
        console.print(Text(line, style), soft_wrap=True)


def _wrapped(text: str, width: int | None, first: int, rest: int) -> list[str]:
    """Wraps and indents a text; does not wrap if the output is not a terminal."""
    lines: list[str] = []
    for number, line in enumerate(text.splitlines()):
        start = " " * (first if number == 0 else rest)
        if width is None:
            lines.append(start + line)
        else:
            shape = textwrap.TextWrapper(
                width,
                initial_indent=start,
                subsequent_indent=" " * rest,
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines += shape.wrap(line)
    return lines


def _verdict(levels: list[str]) -> str:
    faults, warnings = levels.count("fault"), levels.count("warning")
    counted = [
        f"{count} {name}{'' if count == 1 else 's'}" for name, count in (("fault", faults), ("warning", warnings))
    ]
    return f"{counted[0]}, {counted[1]}" if faults or warnings else "nothing is wrong"
