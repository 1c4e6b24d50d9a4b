"""Reads the command line of a training script from a shell script. Nothing is executed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.errors import Problem, RecipeError

LAUNCHERS = frozenset({"torchrun", "deepspeed", "accelerate"})
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
"""Module that `python -m` starts → the launcher that it is."""
COMMANDS = frozenset({"trl", "llamafactory-cli", "axolotl", "swift", "megatron"})
"""Programs whose first argument is a command, such as `trl sft`."""
PYTHON = re.compile(r"python[0-9.]*$")
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
UNSET = re.compile(r"\$\{?[^\s}\"']*\}?|`[^`]*`?")
COUNTS = ("nproc_per_node", "nnodes")
"""Options of torchrun that ms-swift and LLaMA-Factory, which start it, read from variables in capitals."""
SETTINGS_FILE = (".yaml", ".yml", ".json")


@dataclass
class CommandLine:
    """A command line that starts a training script."""

    program: str = ""
    """The script, the module, or the program with its command: `run_clm.py`, `trl sft`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the script, with underscores; several values are a list, and a flag is true."""
    launcher: dict[str, Any] = field(default_factory=dict)
    """Options of the launcher."""
    files: list[str] = field(default_factory=list)
    """Files of settings that are named without an option, or with `--config`."""
    lines: dict[str, int] = field(default_factory=dict)
    """Option → line."""


def parse_command(path: Path, text: str) -> CommandLine:
    """Returns the command line in a shell script. Raises RecipeError if there is none, or several, or a variable."""
    values: dict[str, str] = {}
    found: list[CommandLine] = []
    problems: list[Problem] = []
    for line, source in _logical_lines(text):
        try:
            words = _words(source)
        except ValueError as error:
            problems.append(Problem("import.shell", f"{path}:{line}", f"cannot be read: {error}"))
            continue
        words = words[1:] if words[:1] == ["export"] else words
        if words and all(ASSIGNMENT.match(word) for word in words):
            values.update((name, _expanded(value, values)) for name, _, value in (w.partition("=") for w in words))
            continue
        words = [_expanded(word, values) for word in words]
        if (command := _command(words)) is None:
            continue
        assigned = values | dict(word.split("=", 1) for word in words if ASSIGNMENT.match(word))
        for option in COUNTS:
            if count := assigned.get(option.upper()):
                command.launcher.setdefault(option, plain_value(count))
        for word in words:
            if "$" in word or "`" in word:
                name = (UNSET.search(word) or UNSET.search("$"))[0]  # type: ignore[index]
                message = f"{name} is set outside of the file, or computed"
                problems.append(Problem("import.variable", f"{path}:{line}", message, "write its value"))
        command.lines = _lines_of(source, line, command.options)
        found.append(command)
    if len(found) > 1 and not problems:
        problems.append(Problem("import.shell", str(path), f"starts {len(found)} scripts", "leave one of them"))
    if problems:
        raise RecipeError(problems)
    if not found:
        message = "is neither JSON nor YAML, and has no command that starts training"
        fix = "give a file with a line that begins with python, torchrun, deepspeed, accelerate launch, trl, …"
        raise RecipeError(Problem("import.shell", str(path), message, fix))
    return found[0]


def plain_value(text: str) -> Any:
    """Returns the value that an option's text means: a number, true, false, null, a JSON object, or the text."""
    if text in ("True", "true", "False", "false"):
        return text.lower() == "true"
    if text in ("None", "null"):
        return None
    if text.startswith(("{", "[")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    if re.fullmatch(r"[-+]?[0-9]{1,18}", text):
        return int(text)
    if re.fullmatch(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{1,3})?", text):
        return float(text)
    return text


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields lines with their number; lines that end in a backslash, or within quotes, are joined with the next."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        start, joined = number, lines[number]
        while joined.rstrip().endswith("\\") and number + 1 < len(lines):
            number += 1
            joined = f"{joined.rstrip()[:-1]}\n{lines[number]}"
        number += 1
        if joined.strip() and not joined.lstrip().startswith("#"):
            yield start + 1, joined


HASH = "\ue023"
"""Stands for a `#` within a word."""


def _words(source: str) -> list[str]:
    """Returns the words of a command, up to a pipe or a redirection."""
    within = re.sub(r"(?<=\S)#", HASH, source)  # shlex takes it for the beginning of a comment, a shell does not
    lexer = shlex.shlex(within, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    for word in lexer:
        if word and set(word) <= set("|&;<>"):
            if word.startswith(">") and words and words[-1] in ("1", "2"):
                words.pop()
            break
        words.append(word.replace(HASH, "#"))
    return words


def _expanded(word: str, values: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda found: values.get(found[1] or found[2], found[0]), word)


def _command(words: list[str]) -> CommandLine | None:
    """Returns the command that words are, or None if they start no script. What precedes it is left out."""
    start = next((number for number, word in enumerate(words) if _starts(word)), None)
    if start is None:
        return None
    command, rest = CommandLine(), words[start:]
    while rest:
        name = rest[0].rpartition("/")[2]
        if name in COMMANDS:
            command.program = " ".join([name, *rest[1:2]])
            return _with_options(command, rest[2:])
        if name.endswith(".py"):
            command.program = name
            return _with_options(command, rest[1:])
        if PYTHON.match(name):
            rest = rest[1:]
            while rest and rest[0].startswith("-") and rest[0] != "-m":
                rest = rest[1:]
            if rest[:1] == ["-m"]:
                module = rest[1] if len(rest) > 1 else ""
                if module not in MODULES:
                    command.program = module
                    return _with_options(command, rest[2:])
                rest = [MODULES[module], *(["launch"] if MODULES[module] == "accelerate" else []), *rest[2:]]
        elif name in LAUNCHERS:
            rest = rest[2:] if rest[1:2] == ["launch"] else rest[1:]
            command.launcher, rest = _launcher(rest)
            if rest[:1] == ["-m"] and len(rest) > 1:
                command.program = rest[1]
                return _with_options(command, rest[2:])
        else:
            return None
    return None


def _starts(word: str) -> bool:
    name = word.rpartition("/")[2]
    return name in LAUNCHERS or name in COMMANDS or PYTHON.match(name) is not None


def _launcher(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the options of a launcher, and the words that begin with the script."""
    options: dict[str, Any] = {}
    while words and words[0].startswith("-") and words[0] != "-m":
        name, equals, value = words[0].lstrip("-").partition("=")
        words = words[1:]
        if not equals and words and not words[0].startswith("-") and not words[0].endswith(".py"):
            value, words = words[0], words[1:]
            equals = "="
        options[name.replace("-", "_")] = plain_value(value) if equals else True
    return options, words


def _with_options(command: CommandLine, words: list[str]) -> CommandLine:
    name = ""
    given: dict[str, list[str]] = {}
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            given[name] = [value] if equals else []
        elif name:
            given[name].append(word)
        elif word.endswith(SETTINGS_FILE):
            command.files.append(word)
        elif "=" in word:  # as Hydra writes them
            key, _, value = word.partition("=")
            command.options[key] = plain_value(value)
    for name, values in given.items():
        if name == "config" and values and values[0].endswith(SETTINGS_FILE):
            command.files.append(values[0])
        elif not values and name.startswith("no_") and name != "no_cuda":
            command.options[name.removeprefix("no_")] = False
        else:
            plain = [plain_value(value) for value in values]
            command.options[name] = plain[0] if len(plain) == 1 else plain or True
    return command


def _lines_of(source: str, first: int, options: Mapping[str, Any]) -> dict[str, int]:
    lines: dict[str, int] = {}
    for number, line in enumerate(source.splitlines(), first):
        for name in re.findall(r"--?([A-Za-z][\w-]*)", line):
            key = name.replace("-", "_")
            key = key if key in options else key.removeprefix("no_")
            if key in options:
                lines[key] = number
    return lines
