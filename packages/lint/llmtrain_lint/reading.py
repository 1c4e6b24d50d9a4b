"""Parses a configuration as DeepSpeed does (JSON, else Hjson with comments), with the positions of its keys.

Parsing ends for every input, in time linear in its length: every token of the scanner matches where it starts, so
nothing is scanned twice.
"""

from __future__ import annotations

import json
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from llmtrain_lint.accelerate import block_of, deepspeed_values, places_of
from llmtrain_lint.document import Configuration, NotDeepSpeed, Unreadable
from llmtrain_lint.schema import KeyPath

BYTE_ORDER_MARK = "\ufeff"
LARGEST_FILE = 2**20
"""Largest size of a file in bytes; the largest configurations in use have a few kilobytes."""
MOST_DIGITS = 4000
"""Digits of the longest integer; Python refuses to convert more than 4300."""
DEEPEST = 64
"""Largest depth of nesting; DeepSpeed's own keys are at most six deep."""
_OTHER_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))


def is_yaml(name: str) -> bool:
    """Whether a file is YAML, by its name."""
    return name.endswith((".yaml", ".yml"))


def read_file(path: Path) -> str:
    """Returns the text of a regular file; opening a FIFO or a device could block forever.

    Raises Unreadable.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for matches, name in _OTHER_KINDS if matches(mode)), "a device")
            raise Unreadable(f"cannot be read: is {kind}, not a file")
        with path.open("rb") as file:
            return decode(file.read(LARGEST_FILE + 1))
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        raise Unreadable(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def decode(content: bytes) -> str:
    """Returns the text of bytes.

    Raises Unreadable.
    """
    if len(content) > LARGEST_FILE:
        raise Unreadable(f"is larger than {LARGEST_FILE >> 20} MiB, so it is not a DeepSpeed configuration")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 text (byte {error.start})") from None


def read_configuration(text: str, yaml: bool = False, hjson: bool = False) -> Configuration:
    """Parses the configuration in a text.

    hjson: read NaN and Infinity as DeepSpeed does, and not as Python's json.

    Raises Unreadable or NotDeepSpeed.
    """
    if yaml:
        return read_yaml_configuration(text)
    marked = text.startswith(BYTE_ORDER_MARK)
    text = text.removeprefix(BYTE_ORDER_MARK)
    places = _key_positions(text)
    try:
        values, strict_json_fault, constants = _parse(text, hjson)
        if marked:
            strict_json_fault = (1, 1, "it starts with a byte order mark")
    except RecursionError:
        raise Unreadable("is nested too deeply") from None
    except ValueError as error:  # json and hjson both raise it
        line, column = getattr(error, "lineno", 0), getattr(error, "colno", 0)
        reason = str(getattr(error, "msg", error)).replace(" %r at", "")  # which hjson does not fill in
        raise Unreadable(f"is not JSON: {reason}", line, column, _unquoted_text_hint(text)) from None
    if not isinstance(values, _Object):
        raise Unreadable("contains no JSON object")
    return Configuration(
        values, places, tuple(_repeated(values)), strict_json_fault=strict_json_fault, constants=constants
    )


def read_yaml_configuration(text: str) -> Configuration:
    """Parses a configuration in YAML, which programs load and pass to DeepSpeed as an object.

    Raises Unreadable, also for aliases, which could make a short text endless, or NotDeepSpeed.
    """
    import yaml

    from llmtrain_lint.yaml_text import YamlError, parse_yaml

    try:
        values, places = parse_yaml(text, yaml.SafeLoader, _object)
    except YamlError as fault:
        raise Unreadable(str(fault), fault.line, fault.column) from None
    if not isinstance(values, _Object):
        raise Unreadable("contains no YAML mapping")
    repeated = tuple(_repeated(values))
    if "distributed_type" not in values:
        return Configuration(values, places, repeated)
    if values["distributed_type"] != "DEEPSPEED" and not block_of(values):
        raise NotDeepSpeed("skipped, since it configures Accelerate without DeepSpeed")
    made = deepspeed_values(values)
    return Configuration(made, places_of(places), repeated, reader="accelerate", accelerate=values)


class _Object(dict[str, Any]):
    """A JSON object that records which of its keys occur twice."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    if len(made) != len(pairs):
        made.repeated = tuple(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
    return made


def _parse(text: str, hjson: bool) -> tuple[Any, tuple[int, int, str] | None, bool]:
    """Returns the content of a text, where and why it is not JSON if DeepSpeed still reads it, and whether it has NaN.

    NaN and Infinity are numbers to Python's json, and to Hjson a text up to the end of the line.
    """
    constants: list[float] = []

    def constant(name: str) -> float:
        constants.append(float(name))
        return constants[-1]

    try:
        values = json.loads(text, **_HOOKS, parse_float=_number, parse_constant=constant)
    except json.JSONDecodeError as error:
        return _parse_hjson(text), (error.lineno, error.colno, error.msg), False
    return (_parse_hjson(text) if constants and hjson else values), None, bool(constants)


def _parse_hjson(text: str) -> Any:
    """Parses comments, unquoted words and missing commas, as DeepSpeed does; json parses plain JSON faster."""
    import hjson

    try:
        return hjson.loads(text, **_HOOKS)
    except (IndexError, OverflowError):  # bugs of hjson: on ''' at the start of a text, and on 1e999
        raise ValueError("Hjson cannot parse it") from None


def _number(digits: str) -> float:
    """Converts a number with a fraction or an exponent as Hjson does: 1e3 is an integer."""
    value = float(digits)
    if abs(value) == float("inf"):
        raise ValueError(f"the number {digits[:40]} is too large")
    return int(value) if value.is_integer() and abs(value) < 1e10 else value


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


_HOOKS: dict[str, Any] = {"object_pairs_hook": _object, "parse_int": _integer}


def _repeated(values: _Object) -> list[KeyPath]:
    """Returns the paths of keys that occur twice in one object; objects in a list have the path of the list."""
    found: list[KeyPath] = []
    open_: list[tuple[KeyPath, Any]] = [((), values)]
    while open_:
        where, value = open_.pop()
        if isinstance(value, _Object):
            found.extend((*where, key) for key in value.repeated)
            open_.extend(((*where, key), inner) for key, inner in value.items())
        elif isinstance(value, list):
            open_.extend((where, inner) for inner in value)
    return found


TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*+|\#[^\n]*+|/\*.*?(?:\*/|\Z))
      |(?P<block>'''.*?(?:'''|\Z))
      |(?P<name>"(?:[^"\\\n]|\\.)*+"?|'(?:[^'\\\n]|\\.)*+'?|\w[\w.-]*+)
      |(?P<bracket>[{}\[\]])""",
    re.VERBOSE | re.DOTALL,
)
_COLON = re.compile(r"\s*+:")


def _key_positions(text: str) -> dict[KeyPath, list[tuple[int, int]]]:
    """Returns the line and column of every key by its path; a key that occurs twice has two positions.

    Raises Unreadable if brackets are nested too deeply.
    """
    places: dict[KeyPath, list[tuple[int, int]]] = {}
    path: list[str] = []  # the keys whose values are the open brackets
    key, line, line_start, done = "", 1, 0, 0
    for token in TOKEN.finditer(text):
        start = token.start()
        line += text.count("\n", done, start)
        line_start = text.rfind("\n", done, start) + 1 or line_start
        done = start
        if token["name"] and _COLON.match(text, token.end()):
            key = _unquoted(token["name"])
            outer = path[1:] if path[:1] == [""] else path  # in Hjson the outermost braces are optional
            places.setdefault((*outer, key), []).append((line, start - line_start + 1))
        elif token["bracket"] in ("{", "["):
            path.append(key)
            if len(path) > DEEPEST:
                raise Unreadable(f"is nested deeper than {DEEPEST} levels", line, start - line_start + 1)
        elif token["bracket"] and path:
            path.pop()
    return places


_CONSTANTS = ("NaN", "Infinity")
_WORD = re.compile(r"[ \t]*+(?!(?:true|false|null)[ \t]*+[,}\]\n])([^\W\d][^\n,}\]]*+)")


def _unquoted_text_hint(text: str) -> str:
    """Explains the first unquoted text that contains a bracket: Hjson reads it up to the end of the line."""
    end = 0
    for token in TOKEN.finditer(text):
        colon = _COLON.match(text, token.end()) if token["name"] and token.start() >= end else None
        word = _WORD.match(text, colon.end()) if colon else None
        if word is None:
            continue
        end = text.find("\n", word.end()) % (len(text) + 1)
        if any(bracket in text[word.end() : end] for bracket in "}]"):
            line = text.count("\n", 0, word.start(1)) + 1
            hint = "an unquoted text extends to the end of its line, including brackets and commas"
            meant = word[1].strip()
            return f"line {line}: {hint}; write " + ("a number" if meant in _CONSTANTS else f'"{meant}"')
    return ""


def _unquoted(name: str) -> str:
    if name[0] == '"' and "\\" in name:
        try:
            return str(json.loads(name))
        except ValueError:
            return name
    return name.strip("\"'")
