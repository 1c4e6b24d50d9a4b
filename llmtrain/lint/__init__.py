"""Checks any DeepSpeed configuration for what DeepSpeed would refuse late, silently ignore, change or misread.

`reading` parses a file into a document with the position of each key, `structure` compares it with what DeepSpeed can
read, and `rules` checks combinations of values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from llmtrain.errors import Problem, RecipeError, did_you_mean
from llmtrain.lint.document import READERS, Finding, NotOurs, Reader, Unreadable
from llmtrain.lint.reading import decoded, read_configuration, read_file
from llmtrain.lint.rules import RULES
from llmtrain.lint.rules.readers import guess
from llmtrain.lint.schema import schema
from llmtrain.lint.versions import choose_release
from llmtrain.system.untrusted import is_yaml

__all__ = ["READERS", "RULES", "Finding", "Reader", "Result", "Use", "examine", "parse_allowed"]


@dataclass(frozen=True)
class Use:
    """How a file is used: by which program (guessed if None), on how many ranks, with which arguments of the Trainer.

    `deepspeed` is a version or a range; None means the installed one, or the newest that is known.
    """

    reader: Reader | None = None
    world_size: int | None = None
    data_parallel: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    deepspeed: str | None = None


@dataclass(frozen=True)
class Result:
    """A file, its text and reader (None if it was not read), what is wrong with it, and why it was skipped, if so."""

    name: str
    text: str
    reader: Reader | None
    findings: list[Finding]
    skipped: str = ""

    @property
    def errors(self) -> int:
        """The number of errors."""
        return sum(finding.severity == "error" for finding in self.findings)

    @property
    def readable(self) -> bool:
        """Whether the file contains a configuration, or was skipped."""
        return self.reader is not None or bool(self.skipped)


def examine(name: str, text: str | bytes | Path, use: Use = Use(), allow: Collection[str] = ()) -> Result:
    """Returns everything that is wrong with a configuration. Never raises because of its content.

    `allow` lists rules, or `rule:key` with `*` in the key, whose findings are left out.
    """
    content = text if isinstance(text, str) else ""
    try:
        if not isinstance(text, str):
            content = read_file(text) if isinstance(text, Path) else decoded(text)
        document = read_configuration(content, is_yaml(name))
        reader = use.reader or guess(document)
        if document.constants and reader == "deepspeed":
            document = read_configuration(content, hjson=True)
    except Unreadable as error:
        return Result(name, content, None, [error.finding])
    except NotOurs as reason:
        return Result(name, content, None, [], str(reason))
    used = replace(
        document,
        schema=schema(choose_release(use.deepspeed).deepspeed),
        reader=reader,
        world_size=use.world_size,
        data_parallel=use.data_parallel,
        arguments=dict(use.arguments),
    )
    found = {one for rule in RULES for one in rule.findings(used) if not _is_allowed(one, allow)}
    ordered = sorted(found, key=lambda finding: (finding.line, finding.column, finding.field, finding.rule))
    return Result(name, content, used.reader, ordered)


def parse_allowed(entries: Collection[str], source: str = "--allow") -> frozenset[str]:
    """Returns what to leave out, with full ids of rules: `rule` or `rule:key`; `lint.` may be left out.

    Raises RecipeError for unknown rules, and for `unknown_key` without a key, which would allow every typing error.
    """
    known = [rule.id for rule in RULES]
    full, problems = set(), []
    for given in entries:
        rule, _, key = given.partition(":")
        name = rule if rule.startswith("lint.") else f"lint.{rule}"
        if name not in known:
            message = f"{rule[:80]!r} is not a rule{did_you_mean(name[:80], known)}"
            problems.append(Problem("lint.allow", source, message))
        elif name == "lint.unknown_key" and key in ("", "*"):
            problems.append(
                Problem("lint.allow", source, "needs a key, or every typo would be accepted", f"{rule}:KEY")
            )
        full.add(f"{name}:{key}" if key else name)
    if problems:
        raise RecipeError(problems)
    return frozenset(full)


def _is_allowed(finding: Finding, allow: Collection[str]) -> bool:
    return finding.rule in allow or any(fnmatchcase(f"{finding.rule}:{finding.field}", one) for one in allow)
