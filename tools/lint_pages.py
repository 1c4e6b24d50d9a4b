"""docs/reference/lint.md, a section for each lint rule, and docs/reference/lint_corpus.md, with verdicts.

A verdict is that of the program that reads the file, and of `DeepSpeedConfig` after it: both check a file without
building an engine.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from llmtrain_lint import READERS, RULES, Finding
from llmtrain_lint.document import EFFECTS
from llmtrain_lint.schema import releases, schema, version
from tests.lint.corpus import Case, cases
from tools.page import ROOT, Files, filled, table

VERDICTS = ROOT / "tests/lint/verdicts.json"


@cache
def verdict(case: Case) -> str:
    """Returns the name of the exception that a file causes, or `accepted`.

    That of an older release is one of `tests/lint/verdicts.json`.
    """
    from tests.lint.oracle import answer

    if case.deepspeed != schema().deepspeed:
        answers = json.loads(VERDICTS.read_text(encoding="utf-8"))[case.path.name]
        said = [found for first, found in answers if version(first) <= version(case.deepspeed)][-1]
        return said.removeprefix("config: ") or "accepted"
    said = answer(case.text, case.reader, case.world or 1, case.path.suffix == ".yaml", case.arguments)
    return said.partition(":")[0] or "accepted"


def rules() -> Files:
    """Returns the page of the rules."""
    examples = {one.rule: (case, one) for kind in ("valid", "malformed") for case in cases(kind) for one in _both(case)}
    made = [f"The known releases are {releases()[-1]['deepspeed']} to {schema().deepspeed}.\n"]
    for rule in RULES:
        by = ", by the reader" if rule.by_reader else ""
        example = ""
        if rule.id in examples:  # the corpus has no configurations of Accelerate itself
            case, finding = examples[rule.id]
            example = f"\nExample: `{finding.field}`: {finding.text} ({_name(case)})\n"
        kind = f"{'An error' if rule.severity == 'error' else 'A warning'}, *{EFFECTS[rule.effect]}*{by}"
        made.append(f"## {rule.id}\n\n{kind}. {rule.reason}{rule.releases}\n{example}")
    text = "\n".join(made)
    if sys.version_info >= (3, 13):  # its `json` reports the comma, and older ones what follows it
        comma, key = "Illegal trailing comma before end of object", "Expecting property name enclosed in double quotes"
        text = text.replace(f"line 10 is not strict JSON: {comma}", f"line 11 is not strict JSON: {key}")
    return filled("docs/reference/lint.md", lint=text)


def _both(case: Case) -> list[Finding]:
    return [*case.found("warning"), *case.found("error")]


def corpus() -> Files:
    """Returns the page of the corpus."""
    malformed, valid = ([(case, verdict(case)) for case in cases(kind)] for kind in ("malformed", "valid"))
    missed = sum(said != "accepted" and not case.refused for case, said in malformed)
    counts = [
        ["files", *(f"{len(found)}" for found in (malformed, valid))],
        ["refused by the reader or DeepSpeed", *(f"{_refused(found)}" for found in (malformed, valid))],
        ["with errors of lint", *(f"{_with_errors(found)}" for found in (malformed, valid))],
        ["refused, and lint finds no error that refuses", f"{missed}", "0"],
        ["lines of warnings for a file, at most", "", f"{max(case.lines for case, _ in valid)}"],
    ]
    parts = [
        f"DeepSpeed {schema().deepspeed}, unless a file names another release:\n",
        table(("", "Malformed", "Valid"), counts),
        _cases("Malformed", malformed, "error"),
        _cases("Valid", valid, "warning"),
    ]
    return filled("docs/reference/lint_corpus.md", corpus="\n".join(parts))


def _refused(found: list[tuple[Case, str]]) -> int:
    return sum(said != "accepted" for _, said in found)


def _with_errors(found: list[tuple[Case, str]]) -> int:
    return sum(bool(case.found("error")) for case, _ in found)


def _cases(kind: str, found: list[tuple[Case, str]], severity: str) -> str:
    columns = (kind, "For", "About", f"{severity.capitalize()}s of `llmtrain lint`", "Verdict")
    rows = (
        (_name(case), READERS[case.reader].removeprefix("the "), case.about, _found(case, severity), said)
        for case, said in found
    )
    return table(columns, rows)


def _name(case: Case) -> str:
    return f"[{case.path.stem}](../../{case.path.relative_to(ROOT).as_posix()})" + (
        (f", world {case.world}" if case.world else "")
        + (f", DeepSpeed {case.deepspeed}" if case.deepspeed != schema().deepspeed else "")
    )


def _found(case: Case, severity: str) -> str:
    findings = case.found(severity)
    if severity == "warning":
        return ", ".join(dict.fromkeys(one.rule.removeprefix("lint.") for one in findings))
    return "; ".join(dict.fromkeys(f"`{one.field}` {one.rule.removeprefix('lint.')}" for one in findings))
