"""Defines a lint rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import partial

from llmtrain_lint.document import READERS, Configuration, Effect, Finding, Severity
from llmtrain_lint.errors import printable, truncate
from llmtrain_lint.schema import KeyPath

Fault = tuple[KeyPath, str, str] | tuple[KeyPath, str, str, Effect]
"""The key, the reason, what to do (possibly empty), and the effect if it is not that of the rule."""
Check = Callable[[Configuration], Iterator[Fault]]


@dataclass(frozen=True)
class LintRule:
    """One rule: an `error` if DeepSpeed refuses, ignores, changes or misreads the setting, else a `warning`."""

    id: str
    severity: Severity
    effect: Effect
    reason: str
    check: Check
    by_reader: bool = False
    """Whether the effect is that of the program that reads the file, not of DeepSpeed."""
    since: str = ""
    """The first release of DeepSpeed for which it holds; empty if it holds for the oldest that is known."""
    before: str = ""
    """The first release for which it holds no longer, or empty."""

    @property
    def releases(self) -> str:
        """A sentence about the releases for which it holds, or an empty text if these are all."""
        bounds = [f"from DeepSpeed {self.since} on"] if self.since else []
        bounds += [f"before DeepSpeed {self.before}"] if self.before else []
        return f" It holds {' and '.join(bounds)}." if bounds else ""

    def holds(self, document: Configuration) -> bool:
        """Whether the rule holds for the document's release of DeepSpeed."""
        return (not self.since or document.since(self.since)) and not (self.before and document.since(self.before))

    def findings(self, document: Configuration) -> Iterator[Finding]:
        """Yields the rule's findings in a document, each with its position or that of the nearest enclosing block."""
        if not self.holds(document):
            return
        by = READERS[document.reader if self.by_reader else "deepspeed"]
        for where, message, fix, *other in self.check(document):
            line, column = _place(document, where)
            field = printable(truncate(".".join(where)))
            effect: Effect = other[0] if other else self.effect
            yield Finding(self.id, self.severity, field, printable(truncate(message)), fix, line, column, effect, by)


def key_suggestion(name: str, known: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for a known name that differs by a typing error, or an empty text.

    The words in which they differ must be alike, too: `warmup_max_lr` is not `warmup_min_ratio`.
    """
    for other in get_close_matches(name[:80], list(known), n=3, cutoff=0.8):
        ours, theirs = name.split("_"), other.split("_")
        added = "_".join(word for word in ours if word not in theirs)
        lacking = "_".join(word for word in theirs if word not in ours)
        if not (added and lacking) or SequenceMatcher(None, added, lacking).ratio() >= 0.6:
            return f"; did you mean '{other}'?"
    return ""


def _place(document: Configuration, where: KeyPath) -> tuple[int, int]:
    for length in range(len(where), 0, -1):
        if where[:length] in document.places:
            return document.places[where[:length]][-1]
    return 1, 1  # a key that is missing from the outermost object


def _rule(
    severity: Severity,
    id_: str,
    effect: Effect,
    reason: str,
    by_reader: bool = False,
    since: str = "",
    before: str = "",
) -> Callable[[Check], LintRule]:
    return lambda check: LintRule(f"lint.{id_}", severity, effect, reason, check, by_reader, since, before)


error, warning = partial(_rule, "error"), partial(_rule, "warning")
"""Decorators that make a check a rule whose findings are errors or warnings."""
