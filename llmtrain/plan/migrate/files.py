"""Reads the files of other programs, in whichever form these take their settings. Nothing in a file is executed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from llmtrain.errors import Problem, RecipeError, format_value
from llmtrain.plan.load.yaml_file import CoreLoader
from llmtrain.plan.migrate.command_line import parse_command
from llmtrain.plan.migrate.pickled import read_pickled
from llmtrain.plan.migrate.script import parse_script
from llmtrain.system.untrusted import UNREADABLE, expanded, file_fault, is_file, is_yaml, json_fault, read_text
from llmtrain_lint.document import Unreadable
from llmtrain_lint.reading import read_configuration
from llmtrain_lint.yaml_text import KeyPath, YamlError, parse_yaml

MAX_FILE = 1 << 20
"""Bytes of the longest file of settings; those in use have a few kilobytes."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "number": ("a number", _is_number),
    "count": ("a positive whole number", lambda value: _is_number(value) and value == int(value) and value > 0),
    "text": ("a text", lambda value: isinstance(value, str)),
    "mapping": ("a mapping of names to values", lambda value: isinstance(value, Mapping)),
    "names": ("a name, or a list of names", _is_names),
}
"""Kind of a setting → in words, and the check of a value."""


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

    def check(self, within: str = "", **kinds: str) -> None:
        """Raises RecipeError with every setting that is given and is not of its kind.

        within: dotted key of the mapping that has the settings. kinds: one of `KINDS` → dotted keys with spaces.
        """
        problems = []
        for kind, keys in kinds.items():
            what, is_kind = KINDS[kind]
            for name in keys.split():
                key = f"{within}.{name}" if within else name
                value = self.value(key)
                if value is not None and value is not False and not is_kind(value):
                    message = f"is {format_value(value)}, not {what}"
                    problems.append(Problem("import.value", f"{self.place(key)}: {key}", message))
        if problems:
            raise RecipeError(problems)

    def value(self, key: str) -> Any:
        """Returns the value of a dotted key, in which items of lists are numbered; None if there is none."""
        value: Any = self.values
        for name in key.split("."):
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def error(self, rule: str, key: str, message: str, fix: str = "") -> RecipeError:
        """Returns the error about a setting."""
        return RecipeError(Problem(rule, f"{self.place(key)}: {key}", message, fix))


class ForeignLoader(CoreLoader):
    """Reads `yes`, `no`, `on`, `off` and `500_000` as YAML 1.1, as these programs do, and `2e-5` as a number."""


def _switch(loader: Any, node: yaml.Node) -> bool:
    return str(node.value).lower() in ("true", "yes", "on")


ForeignLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(?:yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)$"), list("yYnNoO")
)
ForeignLoader.add_constructor("tag:yaml.org,2002:bool", _switch)
ForeignLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile("[-+]?[1-9][0-9]*(?:_[0-9]+)+$"), list("-+123456789")
)


def read_foreign(path: Path) -> ForeignFile:
    """Reads a file of settings: JSON, YAML, TOML, a Python script, `training_args.bin`, or a command line.

    Raises RecipeError.
    """
    if is_yaml(path.name):
        return _from_yaml(path)
    if path.suffix == ".toml":
        return _from_toml(path)
    if path.suffix == ".py":
        script = parse_script(path, _text(path))
        return ForeignFile(
            path=path,
            values=script.values,
            lines=script.lines,
            written=script.written,
            program=script.program,
            computed=script.computed,
        )
    if path.suffix in (".bin", ".pt", ".pth"):
        program, values = read_pickled(path)
        return replace(_checked(path, values, {}), program=program)
    text = _text(path)
    if path.suffix == ".json" or text.lstrip()[:1] == "{":
        return _from_json(path, text)
    return _from_command(path, text)


def _from_command(path: Path, text: str) -> ForeignFile:
    """Reads a command line; its options come before what the files say that it names."""
    command = parse_command(path, text)
    values: dict[str, Any] = {}
    for name in command.files:
        found = next((one for one in (path.parent / expanded(name), expanded(name)) if is_file(one)), None)
        if found is None:
            raise RecipeError(Problem("import.file", str(path), f"names {name}, which is not here", "give its path"))
        values |= read_foreign(found).values
    return ForeignFile(
        path=path,
        values=values | command.options,
        lines=command.lines,
        written={name: f"--{name}" for name in command.options},
        program=command.program,
        launcher=command.launcher,
    )


def _from_yaml(path: Path) -> ForeignFile:
    try:
        values, places = parse_yaml(_text(path), ForeignLoader, dict)
    except YamlError as error:
        at = f":{error.line}:{error.column}" if error.line else ""
        raise RecipeError(Problem("import.yaml", f"{path}{at}", str(error))) from None
    return _checked(path, values, places, [where for where, lines in places.items() if len(lines) > 1])


def _from_json(path: Path, text: str) -> ForeignFile:
    """Also reads the comments that DeepSpeed accepts."""
    try:
        read = read_configuration(text)
    except Unreadable as error:
        found = error.finding
        at = f":{found.line}:{found.column}" if found.line else ""
        raise RecipeError(Problem("import.json", f"{path}{at}", found.message, found.fix)) from None
    return _checked(path, read.values, read.places, read.repeated)


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


def _checked(
    path: Path,
    values: Any,
    places: Mapping[KeyPath, list[tuple[int, int]]],
    repeated: Sequence[KeyPath] = (),
) -> ForeignFile:
    """Returns the settings. Raises RecipeError unless they are a mapping of plain values, without a repeated key."""
    if not isinstance(values, dict):
        raise RecipeError(Problem("import.file", str(path), "contains no settings: it is not a mapping of names"))
    if fault := json_fault(values):
        raise RecipeError(Problem("import.file", str(path), fault))
    if repeated:
        raise RecipeError(
            Problem("import.repeated", f"{path}:{places[where][0][0]}: {'.'.join(where)}", "is given twice")
            for where in repeated
        )
    return ForeignFile(
        path=path, values=values, lines={".".join(where): lines[0][0] for where, lines in places.items()}
    )
