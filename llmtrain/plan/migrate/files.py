"""Reads the files of other programs, in whichever form these take their settings. Nothing in a file is executed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.load.yaml_file import CoreLoader
from llmtrain.system.untrusted import UNREADABLE, file_fault, is_yaml, json_fault, read_text
from llmtrain_lint.document import Unreadable
from llmtrain_lint.reading import read_configuration
from llmtrain_lint.yaml_text import YamlError, parse_yaml

MAX_FILE = 1 << 20
"""Bytes of the longest file of settings; those in use have a few kilobytes."""


@dataclass(frozen=True, kw_only=True)
class ForeignFile:
    """The settings in a file of another program."""

    path: Path
    values: Mapping[str, Any]
    """Nested, as in the file."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Dotted key → line, counted from 1, where it is known."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Key → how the file writes it, if that differs: `lora_r` → `LoraConfig(r)`."""
    program: str = ""
    """What a command line starts (`trl sft`, `run_clm.py`), or the class of arguments of a Python file."""
    launcher: Mapping[str, Any] = field(default_factory=dict)
    """Options of the launcher of a command line, with underscores: `num_processes`."""
    computed: Mapping[str, str] = field(default_factory=dict)
    """Settings that a Python file computes at run time → the expression, with its line."""

    def place(self, key: str) -> str:
        """Returns the file, with the line of a dotted key, or of the nearest enclosing one, if it is known."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.path}:{self.lines[key]}" if key else str(self.path)

    def error(self, rule: str, key: str, message: str, fix: str = "") -> RecipeError:
        """Returns the error about a setting."""
        return RecipeError(Problem(rule, f"{self.place(key)}: {key}", message, fix))


def read_foreign(path: Path) -> ForeignFile:
    """Reads a file of settings: JSON, YAML or TOML. Raises RecipeError."""
    if is_yaml(path.name):
        return _from_yaml(path)
    if path.suffix == ".toml":
        return _from_toml(path)
    return _from_json(path)


def _from_yaml(path: Path) -> ForeignFile:
    try:
        values, places = parse_yaml(_text(path), CoreLoader, dict)
    except YamlError as error:
        at = f":{error.line}:{error.column}" if error.line else ""
        raise RecipeError(Problem("import.yaml", f"{path}{at}", str(error))) from None
    return _checked(path, values, {where: lines for where, lines in places.items()})


def _from_json(path: Path) -> ForeignFile:
    """Also reads the comments that DeepSpeed accepts."""
    try:
        read = read_configuration(_text(path))
    except Unreadable as error:
        found = error.finding
        at = f":{found.line}:{found.column}" if found.line else ""
        raise RecipeError(Problem("import.json", f"{path}{at}", found.message, found.fix)) from None
    return _checked(path, read.values, read.places)


def _from_toml(path: Path) -> ForeignFile:
    try:
        values = tomllib.loads(_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RecipeError(Problem("import.toml", str(path), f"is not TOML: {error}")) from None
    return _checked(path, values, {})


def _text(path: Path) -> str:
    try:
        return read_text(path, MAX_FILE)
    except UNREADABLE as error:
        raise RecipeError(Problem("import.file", str(path), f"cannot be read: {file_fault(error)}")) from None


def _checked(path: Path, values: Any, places: Mapping[tuple[str, ...], list[tuple[int, int]]]) -> ForeignFile:
    """Returns the settings. Raises RecipeError unless they are a mapping of plain values, without a repeated key."""
    if not isinstance(values, dict):
        raise RecipeError(Problem("import.file", str(path), "contains no settings: it is not a mapping of names"))
    if fault := json_fault(values):
        raise RecipeError(Problem("import.file", str(path), fault))
    repeated = [(where, lines) for where, lines in places.items() if len(lines) > 1]
    if repeated and not any(isinstance(value, list) for value in values.values()):
        raise RecipeError(
            Problem("import.repeated", f"{path}:{lines[1][0]}: {'.'.join(where)}", f"is already in line {lines[0][0]}")
            for where, lines in repeated
        )
    return ForeignFile(
        path=path, values=values, lines={".".join(where): lines[0][0] for where, lines in places.items()}
    )
