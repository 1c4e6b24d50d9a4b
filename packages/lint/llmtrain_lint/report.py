"""Writes findings as text, JSON, SARIF, or workflow commands of GitHub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata
from typing import Any, Literal
from urllib.parse import quote

from llmtrain_lint import READERS, RULES, Finding, Result
from llmtrain_lint.document import EFFECTS
from llmtrain_lint.errors import printable
from llmtrain_lint.rules.rule import LintRule
from llmtrain_lint.versions import Release

ReportFormat = Literal["text", "json", "sarif", "github"]
PAGE = "reference/lint"
MOST_WARNINGS = 3
"""The most lines of warnings for a file in text."""


@cache
def documentation_url() -> str:
    """Returns the address of the documentation that the installed distribution declares, or an empty text."""
    try:
        declared = metadata.metadata("llmtrain-lint").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    addresses: dict[str, str] = dict(entry.split(", ", 1) for entry in declared)
    return addresses.get("Documentation", "").rstrip("/")


def rule_link(rule: str) -> str:
    """Returns where the documentation has the section of a rule: an address, or else a path of the repository.

    The action of GitHub knows the address of the repository that it was taken from.
    """
    sources = os.environ.get("LLMTRAIN_LINT_DOCS", "docs").rstrip("/")
    page = f"{documentation_url()}/{PAGE}.html" if documentation_url() else f"{sources}/{PAGE}.md"
    return f"{page}#{rule.replace('.', '')}"


def format_results(results: list[Result], form: ReportFormat, release: Release, guessed: bool) -> str:
    """Formats all findings; guessed: whether the readers were guessed."""
    if form in ("text", "github"):
        lines = (
            _text(results, guessed)
            if form == "text"
            else (_github(one, finding) for one in results for finding in merge_findings(one.findings))
        )
        return "\n".join((f"as read by DeepSpeed {release.deepspeed} ({release.why})", *lines))
    made = _as_json(results) if form == "json" else _sarif(results)
    place = made if form == "json" else made["runs"][0]["properties"]
    place["deepspeed"] = release.deepspeed
    return json.dumps(made, indent=2)


def describe_rule(rule: LintRule) -> str:
    """Describes a rule, for --explain."""
    kind = (
        f"{rule.id}: {rule.severity}; the setting is {EFFECTS[rule.effect]}{' by the reader' if rule.by_reader else ''}"
    )
    return f"{kind}\n{rule.reason}{rule.releases}\n{rule_link(rule.id)}"


def merge_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Joins findings that only differ in their field; the position is that of the first."""
    groups: dict[tuple[str, str, str, str], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.rule, one.message, one.fix, one.effect), []).append(one)
    return [replace(group[0], field=", ".join(dict.fromkeys(one.field for one in group))) for group in groups.values()]


def place(finding: Finding) -> str:
    """Returns the position of a finding, or an empty text if the file could not be read."""
    return f":{finding.line}:{finding.column}" if finding.line else ""


def lines(result: Result) -> list[str]:
    """Returns the lines of a file's findings; if there were many warnings, the last line names the rest of them."""
    found = merge_findings(result.findings)
    warnings = [one for one in found if one.severity == "warning"]
    rest = warnings[MOST_WARNINGS - 1 :] if len(warnings) > MOST_WARNINGS else []
    name = printable(result.name)
    made = [
        f"{name}{place(one)}: {one.severity}: {one.field}: {one.text} [{one.rule}]" for one in found if one not in rest
    ]
    if rest:
        named = ", ".join(f"{one.field} [{one.rule}]" for one in rest)
        made.append(f"{name}: {len(rest)} further warnings, which --format json explains: {named}")
    return made


def _text(results: list[Result], guessed: bool) -> Iterable[str]:
    for one in results:
        warnings = len(one.findings) - one.errors
        counts = f"{_counted(one.errors, 'error')}, {_counted(warnings, 'warning')}" if one.findings else "clean"
        reader = f" for {READERS[one.reader]}{' (guessed, see --for)' if guessed else ''}" if one.reader else ""
        yield f"{printable(one.name)}{reader}: {one.skipped or counts}"
        yield from lines(one)
    if any(one.findings for one in results):
        page = rule_link("").rstrip("#")
        yield f"rules: {page}" if "://" in page else "--explain RULE describes a rule"
    if len(results) > 1:
        errors, all_ = sum(one.errors for one in results), sum(len(one.findings) for one in results)
        files, found = _counted(len(results), "file"), _counted(errors, "error")
        yield f"{files}: {found}, {_counted(all_ - errors, 'warning')}"


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _github(result: Result, finding: Finding) -> str:
    """Returns a workflow command, whose properties and message escape what ends them."""

    def escaped(text: str, also: str = "") -> str:
        return "".join(f"%{ord(sign):02X}" if sign in "%\r\n" + also else sign for sign in text)

    where = {"line": finding.line, "col": finding.column} if finding.line else {}
    properties = {"file": result.name, **where, "title": finding.rule}
    listed = ",".join(f"{name}={escaped(str(value), ':,')}" for name, value in properties.items())
    return f"::{finding.severity} {listed}::{escaped(f'{finding.field}: {finding.text} ({rule_link(finding.rule)})')}"


def _as_json(results: list[Result]) -> dict[str, Any]:
    return {
        "files": [
            {
                "file": one.name,
                "for": one.reader,
                "findings": [{**asdict(finding), "page": rule_link(finding.rule)} for finding in one.findings],
            }
            for one in results
        ],
        "errors": sum(one.errors for one in results),
        "warnings": sum(len(one.findings) - one.errors for one in results),
    }


def _sarif(results: list[Result]) -> dict[str, Any]:
    """Returns a log of SARIF 2.1.0, whose lines and columns count from 1."""
    rules = [
        {
            "id": rule.id,
            "shortDescription": {"text": rule.reason},
            "help": {"text": f"{rule.reason} See {rule_link(rule.id)}."},
            "defaultConfiguration": {"level": rule.severity},
            **({"helpUri": rule_link(rule.id)} if "://" in rule_link(rule.id) else {}),  # which must be absolute
        }
        for rule in RULES
    ]
    found = [
        {
            "ruleId": finding.rule,
            "level": finding.severity,
            "message": {"text": f"{finding.field}: {finding.text}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": quote(os.fsencode(one.name))},
                        "region": {"startLine": max(1, finding.line), "startColumn": max(1, finding.column)},
                    }
                }
            ],
        }
        for one in results
        for finding in one.findings
    ]
    driver = {"name": "llmtrain lint", "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": found, "properties": {}}],
    }
