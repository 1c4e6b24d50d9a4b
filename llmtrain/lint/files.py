"""Finds the files to check, and the settings of a project."""

from __future__ import annotations

import glob
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from llmtrain.errors import Problem, RecipeError, did_you_mean
from llmtrain.lint import READERS, Reader, parse_allowed
from llmtrain.lint.document import NotOurs, Unreadable
from llmtrain.lint.reading import LARGEST_FILE, read_configuration, read_file
from llmtrain.lint.schema import schema
from llmtrain.system.untrusted import is_yaml

STDIN = "-"
_SUFFIXES = (".json", ".hjson", ".json5", ".yaml", ".yml")
_IS_CONFIGURATION = re.compile(r"\b(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)[\"']?\s*:")
_TABLE = "tool.llmtrain.lint"
_HOMES = {"llmtrain-lint.toml": "", "pyproject.toml": _TABLE}
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


def sources(names: list[str]) -> list[tuple[str, bytes | Path]]:
    """Returns the name of each file and its path, or its content for standard input.

    In folders and patterns, a file is only taken if it mentions batch sizes or ZeRO, and if most of its keys are not
    those of another program. A file that several links lead to is taken once.

    Raises RecipeError if there is none.
    """
    made: dict[str, bytes | Path] = {}
    problems = []
    for name in dict.fromkeys(names):  # standard input can be read once
        found = list(_expanded(name))
        if not found:
            problems.append(Problem("lint.files", name, "there is no DeepSpeed configuration here"))
        made.update(found)
    if problems:
        raise RecipeError(problems)
    return list(made.items())


def _expanded(name: str) -> Iterator[tuple[str, bytes | Path]]:
    path = Path(name)
    if name == STDIN:
        yield "<stdin>", _standard_input()
    elif path.is_dir():
        yield from ((str(one), one) for one in _once(sorted(path.rglob("*"))) if _is_configuration(one, path))
    elif any(sign in name for sign in "*?[") and not path.exists():
        matching = (Path(one) for one in sorted(glob.glob(name, recursive=True)))  # noqa: PTH207 - `**`, absolute
        yield from ((str(one), one) for one in _once(matching) if _is_configuration(one, one.parent))
    else:
        yield name, path


def _once(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields the first of the paths that lead to the same file."""
    seen = set()
    for path in paths:
        real = os.path.realpath(path)
        if real not in seen:
            seen.add(real)
            yield path


def _standard_input() -> bytes:
    """Returns the input, at most one byte more than the largest file has. Raises RecipeError."""
    if sys.stdin is None:
        raise RecipeError(Problem("lint.files", STDIN, "standard input is closed"))
    return sys.stdin.buffer.read(LARGEST_FILE + 1)


def _is_configuration(path: Path, top: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(top).parts)
    if hidden or path.suffix not in _SUFFIXES or not path.is_file():
        return False
    try:
        text = read_file(path)
    except Unreadable:
        return False
    return _IS_CONFIGURATION.search(text) is not None and _has_our_keys(text, path)


def _has_our_keys(text: str, path: Path) -> bool:
    """Whether a file configures ZeRO, or has at least as many keys of DeepSpeed as others, or cannot be read."""
    try:
        keys = read_configuration(text, is_yaml(path.name)).values.keys()
    except (Unreadable, NotOurs):
        return True
    return "zero_optimization" in keys or 2 * len(keys & (schema().root.keys or {}).keys()) >= len(keys)


def settings(folder: Path) -> Settings:
    """Returns the settings of the nearest file that has any.

    Raises RecipeError if they are wrong.
    """
    for one, (name, where) in product((folder, *folder.parents), _HOMES.items()):
        file = one / name
        if file.is_file():
            try:
                table: Any = tomllib.loads(read_file(file))
            except (Unreadable, ValueError, RecursionError) as error:
                raise RecipeError(Problem("lint.settings", str(file), str(error))) from None
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
        raise RecipeError(problems)
    entries = {pattern: parse_allowed(found, wrong) for pattern, found in per_file.items()}
    return Settings(reader, deepspeed, parse_allowed(allow, wrong), entries, file.parent.absolute())
