"""Discovers the files to check, and loads the settings of a project."""

from __future__ import annotations

import glob
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from llmtrain_lint import READERS, Reader, parse_allowed
from llmtrain_lint.accelerate import file_of, ranks_of
from llmtrain_lint.document import NotDeepSpeed, Unreadable
from llmtrain_lint.errors import Problem, UsageError, did_you_mean
from llmtrain_lint.reading import LARGEST_FILE, is_yaml, read_configuration, read_file
from llmtrain_lint.schema import schema

STDIN = "-"
_SUFFIXES = (".json", ".hjson", ".json5", ".yaml", ".yml")
_IS_CONFIGURATION = re.compile(r"\b(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)[\"']?\s*:")
_TABLE = "tool.llmtrain.lint"
_SETTINGS_FILES = {"llmtrain-lint.toml": "", "pyproject.toml": _TABLE}
"""The files that may have settings, and the table that has them: the whole file if it is empty."""


@dataclass(frozen=True)
class Settings:
    """The settings of a project: llmtrain-lint.toml, or the table `tool.llmtrain.lint` of pyproject.toml."""

    reader: Reader | None = None
    deepspeed: str | None = None
    allow: frozenset[str] = frozenset()
    per_file: dict[str, frozenset[str]] = field(default_factory=dict)
    folder: Path = Path()

    def allowed_in(self, name: str) -> frozenset[str]:
        """Returns the rules that do not apply to a file; patterns are relative to the folder of the table."""
        path = Path(name).absolute()
        relative = path.relative_to(self.folder).as_posix() if path.is_relative_to(self.folder) else name
        matching = [found for pattern, found in self.per_file.items() if fnmatchcase(relative, pattern)]
        return self.allow.union(*matching)


def find_files(names: list[str]) -> list[tuple[str, bytes | Path]]:
    """Expands files, folders, patterns and `-`. Returns each name with its path, or the content of standard input.

    In folders and patterns, a file is only taken if it mentions batch sizes or ZeRO, and if most of its keys are not
    those of another program. A file that several links lead to is taken once.

    Raises UsageError if there is none.
    """
    made: dict[str, bytes | Path] = {}
    problems = []
    for name in dict.fromkeys(names):  # standard input can be read once
        found = list(_expanded(name))
        if not found:
            problems.append(Problem("lint.files", name, "there is no DeepSpeed configuration here"))
        made.update(found)
    if problems:
        raise UsageError(problems)
    return list(made.items())


def named_by_accelerate(files: list[tuple[str, bytes | Path]]) -> dict[Path, int | None]:
    """Returns the files for DeepSpeed that configurations of Accelerate name, and the numbers of their ranks.

    A relative path is one from the working directory, as for Accelerate, or else from the folder of the configuration.
    """
    named = {}
    for name, path in files:
        if not isinstance(path, Path) or not is_yaml(name):
            continue
        with suppress(Unreadable, NotDeepSpeed):
            own = read_configuration(read_file(path), yaml=True).accelerate
            if own is not None and (file := file_of(own)) is not None:
                places = (Path(file), path.parent / file)
                named.update({found: ranks_of(own) for found in [one for one in places if _is_file(one)][:1]})
    return named


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # an overlong name, or one with a NUL
        return False


def _expanded(name: str) -> Iterator[tuple[str, bytes | Path]]:
    path = Path(name)
    if name == STDIN:
        yield "<stdin>", _standard_input()
    elif path.is_dir():
        yield from ((str(one), one) for one in _without_links(sorted(path.rglob("*"))) if _is_configuration(one, path))
    elif any(sign in name for sign in "*?[") and not path.exists():
        matching = (Path(one) for one in sorted(glob.glob(name, recursive=True)))  # noqa: PTH207 - `**`, absolute
        yield from ((str(one), one) for one in _without_links(matching) if _is_configuration(one, one.parent))
    else:
        yield name, path


def _without_links(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields the first of the paths that lead to the same file."""
    seen = set()
    for path in paths:
        real = os.path.realpath(path)
        if real not in seen:
            seen.add(real)
            yield path


def _standard_input() -> bytes:
    """Returns the input, at most one byte more than the largest file has. Raises UsageError."""
    if sys.stdin is None:
        raise UsageError(Problem("lint.files", STDIN, "standard input is closed"))
    return sys.stdin.buffer.read(LARGEST_FILE + 1)


def _is_configuration(path: Path, top: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(top).parts)
    if hidden or path.suffix not in _SUFFIXES or not path.is_file():
        return False
    try:
        text = read_file(path)
    except Unreadable:
        return False
    return _IS_CONFIGURATION.search(text) is not None and _has_deepspeed_keys(text, path)


def _has_deepspeed_keys(text: str, path: Path) -> bool:
    """Whether a file configures ZeRO, or has at least as many keys of DeepSpeed as others, or cannot be read."""
    try:
        keys = read_configuration(text, is_yaml(path.name)).values.keys()
    except (Unreadable, NotDeepSpeed):
        return True
    return "zero_optimization" in keys or 2 * len(keys & (schema().root.keys or {}).keys()) >= len(keys)


def load_settings(folder: Path) -> Settings:
    """Loads the settings of a project from the nearest file that has any, in the folder or above it.

    Raises UsageError if they are wrong.
    """
    for one, (name, where) in product((folder, *folder.parents), _SETTINGS_FILES.items()):
        file = one / name
        if file.is_file():
            try:
                table: Any = tomllib.loads(read_file(file))
            except (Unreadable, ValueError, RecursionError) as error:
                raise UsageError(Problem("lint.settings", str(file), str(error))) from None
            for key in where.split(".") if where else ():
                table = table.get(key) if isinstance(table, dict) else None
            if table is not None:
                return _settings(table, file, f"[{where}] of {file}" if where else str(file))
    return Settings()


def _settings(table: Any, file: Path, wrong: str) -> Settings:
    known = ("for", "deepspeed", "allow", "per-file-allow")
    given = table if isinstance(table, dict) else {"": table}
    problems = [
        Problem("lint.settings", wrong, f"{key[:80]!r} is not a setting{did_you_mean(key[:80], known)}")
        for key in given
        if key not in known
    ]
    reader, allow, per_file = given.get("for"), given.get("allow", []), given.get("per-file-allow", {})
    if reader is not None and reader not in READERS:
        problems.append(Problem("lint.settings", wrong, f"'for' is one of {', '.join(READERS)}"))
    deepspeed = given.get("deepspeed")
    if deepspeed is not None and not isinstance(deepspeed, str):
        problems.append(Problem("lint.settings", wrong, "'deepspeed' is a version or a range, as text"))
    lists = [allow, *(per_file.values() if isinstance(per_file, dict) else [None])]
    if not all(isinstance(one, list) and all(isinstance(entry, str) for entry in one) for one in lists):
        message = "'allow' is a list of rules, and 'per-file-allow' a table of such lists"
        problems.append(Problem("lint.settings", wrong, message))
    if problems:
        raise UsageError(problems)
    entries = {pattern: parse_allowed(found, wrong) for pattern, found in per_file.items()}
    return Settings(reader, deepspeed, parse_allowed(allow, wrong), entries, file.parent.absolute())
