"""Writes findings as text, JSON, SARIF, or workflow commands of GitHub."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Literal

from llmtrain.lint import READERS, RULES, Finding, Result

Format = Literal["text", "json", "sarif", "github"]
PAGE = "docs/reference/lint.md"


def link(rule: str) -> str:
    """Returns where the documentation has the section of a rule."""
    return f"{PAGE}#{rule.replace('.', '')}"


def written(results: list[Result], form: Format, guessed: bool) -> str:
    """Returns all findings in a format; `guessed` tells whether the readers are."""
    if form == "text":
        return "\n".join(_text(results, guessed))
    if form == "github":
        return "\n".join(_github(one, finding) for one in results for finding in joined(one.findings))
    return json.dumps(_as_json(results) if form == "json" else _sarif(results), indent=2)


def joined(findings: Iterable[Finding]) -> list[Finding]:
    """Joins findings that differ in their field alone; the position is that of the first."""
    groups: dict[tuple[str, str, str, str], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.rule, one.message, one.fix, one.effect), []).append(one)
    return [
        Finding(**{**asdict(group[0]), "field": ", ".join(dict.fromkeys(one.field for one in group))})
        for group in groups.values()
    ]


def _text(results: list[Result], guessed: bool) -> Iterable[str]:
    for one in results:
        warnings = len(one.findings) - one.errors
        counts = f"{_counted(one.errors, 'error')}, {_counted(warnings, 'warning')}" if one.findings else "clean"
        reader = f" for {READERS[one.reader]}{' (guessed, see --for)' if guessed else ''}" if one.reader else ""
        yield f"{one.name}{reader}: {counts}"
        for finding in joined(one.findings):
            place = f"{one.name}:{finding.line}:{finding.column}"
            yield f"{place}: {finding.severity}: {finding.field}: {finding.text} [{finding.rule}]"
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

    properties = {"file": result.name, "line": finding.line, "col": finding.column, "title": finding.rule}
    listed = ",".join(f"{name}={escaped(str(value), ':,')}" for name, value in properties.items())
    return f"::{finding.severity} {listed}::{escaped(f'{finding.field}: {finding.text} ({link(finding.rule)})')}"


def _as_json(results: list[Result]) -> dict[str, Any]:
    return {
        "files": [
            {
                "file": one.name,
                "for": one.reader,
                "findings": [{**asdict(finding), "page": link(finding.rule)} for finding in one.findings],
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
            "help": {"text": f"{rule.reason} See {link(rule.id)}."},
            "defaultConfiguration": {"level": rule.severity},
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
                        "artifactLocation": {"uri": one.name},
                        "region": {"startLine": max(1, finding.line), "startColumn": max(1, finding.column)},
                    }
                }
            ],
        }
        for one in results
        for finding in one.findings
    ]
    driver = {"name": "llmtrain lint", "rules": rules}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return {"$schema": schema, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": found}]}
