"""A linter for DeepSpeed configurations: finds settings that are refused late, silently ignored, changed or misread.

`reading` parses a file into a `Configuration` with the position of each key. The modules of `rules` check it:
`structure` compares single keys and values with the `schema` of a release, the others check combinations of values.
`fixing` edits the text, `report` formats the findings, and `command` is the command line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from llmtrain_lint.accelerate import file_of, ranks_of
from llmtrain_lint.document import READERS, Finding, NotDeepSpeed, Reader, Unreadable
from llmtrain_lint.errors import Problem, UsageError, did_you_mean
from llmtrain_lint.reading import decode, is_yaml, read_configuration, read_file
from llmtrain_lint.rules import ACCELERATE, RULES
from llmtrain_lint.rules.readers import guess
from llmtrain_lint.schema import schema
from llmtrain_lint.versions import choose_release

__all__ = ["READERS", "RULES", "Finding", "Reader", "Result", "UsageError", "Use", "examine", "parse_allowed"]


@dataclass(frozen=True)
class Use:
    """The context in which a file is read: the program (guessed if None), ranks, and arguments of the Trainer.

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
    """Lints one configuration, given as text, bytes or a path. Never raises because of its content.

    `allow` lists rules, or `rule:key` with `*` in the key, whose findings are left out.
    """
    content = text if isinstance(text, str) else ""
    try:
        if not isinstance(text, str):
            content = read_file(text) if isinstance(text, Path) else decode(text)
        document = read_configuration(content, is_yaml(name))
        own = document.accelerate
        reader = "accelerate" if own is not None else use.reader or guess(document)
        if document.constants and reader == "deepspeed":
            document = read_configuration(content, hjson=True)
    except Unreadable as error:
        return Result(name, content, None, [error.finding])
    except NotDeepSpeed as reason:
        return Result(name, content, None, [], str(reason))
    used = replace(
        document,
        schema=schema(choose_release(use.deepspeed).deepspeed),
        reader=reader,
        world_size=use.world_size or (None if own is None else ranks_of(own)),
        data_parallel=use.data_parallel,
        arguments=dict(use.arguments),
    )
    # DeepSpeed's configuration is in the file that Accelerate's names, if it names one.
    rules = ACCELERATE if own is not None and file_of(own) else RULES
    found = {one for rule in rules for one in rule.findings(used) if not _is_allowed(one, allow)}
    ordered = sorted(found, key=lambda finding: (finding.line, finding.column, finding.field, finding.rule))
    return Result(name, content, used.reader, ordered)


def parse_allowed(entries: Collection[str], source: str = "--allow") -> frozenset[str]:
    """Parses suppressions, `rule` or `rule:key`, and returns them with full ids; `lint.` may be left out.

    Raises UsageError for unknown rules, and for `unknown_key` without a key, which would allow every typing error.
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
        raise UsageError(problems)
    return frozenset(full)


def _is_allowed(finding: Finding, allow: Collection[str]) -> bool:
    return finding.rule in allow or any(fnmatchcase(f"{finding.rule}:{finding.field}", one) for one in allow)
