"""Checks any DeepSpeed configuration for what DeepSpeed would refuse late, silently ignore, change or misread.

`reading` parses a file into a document with the position of each key, `structure` compares it with what DeepSpeed can
read, and `rules` checks combinations of values.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from llmtrain.errors import Problem, RecipeError, nearest
from llmtrain.lint.document import Configuration, Finding, Unreadable
from llmtrain.lint.reading import read_file, read_text
from llmtrain.lint.rules import RULES

__all__ = ["RULES", "Finding", "allowed", "lint_file", "lint_text"]


def lint_file(path: Path, world_size: int | None = None, allow: Collection[str] = ()) -> list[Finding]:
    """Returns everything that is wrong with a DeepSpeed configuration file. Never raises because of its content.

    `world_size` is the number of devices, for the batch equation. Findings of the rules in `allow` are left out.
    """
    try:
        document = read_file(path, world_size)
    except Unreadable as error:
        return [error.finding]
    return _findings(document, allow)


def lint_text(text: str, world_size: int | None = None, allow: Collection[str] = ()) -> list[Finding]:
    """Does the same as `lint_file` for the text of a configuration: JSON, or Hjson as DeepSpeed reads it."""
    try:
        document = read_text(text, world_size)
    except Unreadable as error:
        return [error.finding]
    return _findings(document, allow)


def allowed(rules: Collection[str]) -> frozenset[str]:
    """Returns the full ids of the rules to ignore, as the command line gives them; `lint.` may be left out.

    Raises: RecipeError for unknown rules.
    """
    known = [rule.id for rule in RULES]
    full = {rule: rule if rule.startswith("lint.") else f"lint.{rule}" for rule in rules}
    problems = [
        Problem("lint.allow", "--allow", f"{given[:80]!r} is not a rule{nearest(name[:80], known)}")
        for given, name in full.items()
        if name not in known
    ]
    if problems:
        raise RecipeError(problems)
    return frozenset(full.values())


def _findings(document: Configuration, allow: Collection[str]) -> list[Finding]:
    found = [finding for rule in RULES if rule.id not in allow for finding in rule.findings(document)]
    return sorted(set(found), key=lambda finding: (finding.line, finding.column, finding.field, finding.rule))
