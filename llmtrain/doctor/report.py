"""All that the doctor has found, as data and as lines for people. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from llmtrain.doctor.finding import Finding

STYLES = {"warning": "yellow", "fault": "bold red"}
MARGIN = 2
LABEL = 14
"""Characters before what was found."""


@dataclass
class HostReport:
    """What one host has told."""

    name: str
    findings: list[Finding]
    facts: dict[str, Any] = field(default_factory=dict)
    built: list[dict[str, Any]] = field(default_factory=list)

    @property
    def was_reached(self) -> bool:
        """Whether it was looked at."""
        return bool(self.facts)


@dataclass
class Report:
    """The whole."""

    hosts: list[HostReport]
    together: list[Finding] = field(default_factory=list)
    """Of all hosts and ranks together."""
    all_reduce: dict[str, Any] = field(default_factory=dict)

    def of_level(self, level: str) -> list[tuple[str, Finding]]:
        """(host or "", finding) of a level."""
        own = [(host.name, one) for host in self.hosts for one in host.findings]
        everything = [*own, *(("", one) for one in self.together)]
        return [(name, one) for name, one in everything if one.level == level]

    def document(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "faults": len(self.of_level("fault")),
            "warnings": len(self.of_level("warning")),
            "hosts": [
                {
                    "host": host.name,
                    "reached": host.was_reached,
                    "findings": [one.as_dict() for one in host.findings],
                    "facts": host.facts,
                    "prebuilt": host.built,
                }
                for host in self.hosts
            ],
            "together": [one.as_dict() for one in self.together],
            "all_reduce": self.all_reduce or None,
        }


def show(report: Report, console: Console) -> None:
    """What is well by group, then warnings, then faults, each with what mends it."""
    width = console.width if console.is_terminal else None
    for host in report.hosts:
        heading = host.name if host.was_reached else f"{host.name}: not looked at"
        console.print(Text(heading, "bold"), soft_wrap=True)
        for shown in _groups(host.findings, width):
            console.print(shown, soft_wrap=True)
    if report.together:
        if len(report.hosts) > 1:
            console.print(Text("together", "bold"))
        for shown in _groups(report.together, width):
            console.print(shown, soft_wrap=True)
    several = len(report.hosts) > 1
    for level in ("warning", "fault"):
        found = report.of_level(level)
        if found:
            console.print()
        for name, one in found:
            told = [f"{name}: " if name and several and not one.text.startswith(f"{name}:") else ""]
            for line in _wrapped(f"{level}: {''.join(told)}{one.text} [{one.check}]", width, 0, 4):
                console.print(Text(line, STYLES[level]), soft_wrap=True)
            for line in _wrapped(one.fix, width, 4, 4):
                console.print(Text(line), soft_wrap=True)
    console.print()
    console.print(Text(_verdict(report)), soft_wrap=True)


def _groups(findings: list[Finding], width: int | None) -> Iterator[Text]:
    """Lines of what is well, each group labelled once; a group of which nothing is well points to the end."""
    groups: dict[str, list[Finding]] = {}
    for one in findings:
        groups.setdefault(one.group, []).append(one)
    for group, members in groups.items():
        label = group.replace("_", "-")
        told = [one.text for one in members if one.level == "ok"]
        ill = [one.level for one in members if one.level != "ok"]
        if not told:
            told = ["see below"] if ill else []
        for text in told:
            first, *rest = _wrapped(text, width, MARGIN + LABEL, MARGIN + LABEL)
            yield Text.assemble(" " * MARGIN, (f"{label:<{LABEL}}", "cyan"), first.lstrip())
            for line in rest:
                yield Text(line)
            label = ""


def _wrapped(text: str, width: int | None, first: int, rest: int) -> list[str]:
    """The lines of a text, indented; not broken where the output is no terminal."""
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


def _verdict(report: Report) -> str:
    faults, warnings = len(report.of_level("fault")), len(report.of_level("warning"))
    counted = [
        f"{count} {name}{'' if count == 1 else 's'}" for name, count in (("fault", faults), ("warning", warnings))
    ]
    return f"{counted[0]}, {counted[1]}" if faults or warnings else "nothing is wrong"
