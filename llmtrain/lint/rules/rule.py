"""Defines a lint rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmtrain.errors import printable, short
from llmtrain.lint.document import Configuration, Finding, Severity, Where

Fault = tuple[Where, str, str]
"""The key, what is wrong with it, and what to do (possibly empty)."""
Check = Callable[[Configuration], Iterator[Fault]]


@dataclass(frozen=True)
class LintRule:
    """One rule: an `error` if DeepSpeed refuses, ignores, changes or misreads the setting, else a `warning`."""

    id: str
    severity: Severity
    reason: str
    check: Check

    def findings(self, document: Configuration) -> Iterator[Finding]:
        """Yields the rule's findings in a document, each with its position or that of the nearest enclosing block."""
        for where, message, fix in self.check(document):
            line, column = _place(document, where)
            field = printable(short(".".join(where)))
            yield Finding(self.id, self.severity, field, printable(short(message)), fix, line, column)


def _place(document: Configuration, where: Where) -> tuple[int, int]:
    for length in range(len(where), 0, -1):
        if where[:length] in document.places:
            return document.places[where[:length]][-1]
    return 1, 1  # a key that is missing from the outermost object


def error(id_: str, reason: str) -> Callable[[Check], LintRule]:
    """Makes a check a rule whose findings are errors."""
    return lambda check: LintRule(f"lint.{id_}", "error", reason, check)


def warning(id_: str, reason: str) -> Callable[[Check], LintRule]:
    """Makes a check a rule whose findings are warnings."""
    return lambda check: LintRule(f"lint.{id_}", "warning", reason, check)
