"""Automatic fixes: renamed and misplaced keys, switches and numbers written as text, fractional counts.

The text is edited in place, which keeps comments, order and layout. Keys are only moved in JSON, and in Hjson with
braces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llmtrain.lint.document import Configuration, NotOurs, Unreadable
from llmtrain.lint.reading import BYTE_ORDER_MARK, read_configuration
from llmtrain.lint.rules.structure import fits, home, known, meaning
from llmtrain.lint.schema import RENAMED, Node, Schema, Where

Edit = tuple[int, int, str]
_STRING = r'"(?:[^"\\\n]|\\.)*+"'
_SCALAR = re.compile(rf"{_STRING}|[^\s,\]}}/#]++")
_SKIPPED = re.compile(r"(?:\s|//[^\n]*|#[^\n]*|/\*.*?\*/)*+", re.DOTALL)


def fixed(text: str, schema: Schema, yaml: bool = False) -> str:
    """Returns the text with all automatic fixes for a release of DeepSpeed."""
    text = text.removeprefix(BYTE_ORDER_MARK)
    for _ in range(len(text)):  # each pass fixes at least one key, or is the last
        try:
            document = replace(read_configuration(text, yaml), schema=schema)
        except (Unreadable, NotOurs):
            return text
        edits = next(_mended(text, document, yaml), [])
        if not edits:
            return text
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new + text[end:]
    return text


def _mended(text: str, document: Configuration, yaml: bool) -> Iterator[list[Edit]]:
    """Yields the edits of one fault after the other."""
    starts = [0, *(line.end() for line in re.finditer("\n", text))]
    for where, value, node in known(document):
        places = document.places.get(where, [])
        if len(places) != 1:
            continue
        line, column = places[0]
        key = starts[line - 1] + column - 1
        quote = text[key] if text[key] in "\"'" else ""
        end = key + len(where[-1]) + 2 * len(quote)
        colon = re.compile(r"\s*:\s*").match(text, end)
        if colon is None or text[key:end] != f"{quote}{where[-1]}{quote}":
            continue
        target = _target(where, document) if node is None else None
        if target and target[:-1] == where[:-1]:
            yield [(key, end, f"{quote}{target[-1]}{quote}")]
        elif target and not yaml and (moved := _moved(text, document, key, colon.end(), target)):
            yield moved
        elif node is not None and (new := _value(value, node)) is not None:
            old = _SCALAR.match(text, colon.end())
            if old and _spells(old[0], value):
                yield [(old.start(), old.end(), json.dumps(new))]


def _target(where: Where, document: Configuration) -> Where | None:
    """Returns the path at which a key that is unknown here belongs, if it is free and its block exists or is made."""
    named = tuple(RENAMED[where].split(".")) if where in RENAMED and ":" not in RENAMED[where] else None
    target = named or home(where, document)
    if target is None or target in document.schema.elsewhere or document.has(*target):
        return None
    return target if len(target) <= 2 or document.has(*target[:-1]) else None


def _value(value: Any, node: Node) -> Any:
    """Returns the value that is meant, or None if nothing is wrong or it is unclear."""
    if value == "auto" or fits(value, node):
        return None
    if isinstance(value, str):
        return meaning(value, node)
    counts = "int" in node.types and "float" not in node.types
    return int(value) if counts and type(value) is float and 1 <= value < 2**53 else None


def _spells(token: str, value: Any) -> bool:
    """Whether a token is the whole of a value, which that of YAML's tags, anchors and longer texts is not."""
    try:
        return token.strip("\"'") == value if isinstance(value, str) else float(token) == value
    except ValueError:
        return False


def _moved(text: str, document: Configuration, key: int, value: int, target: Where) -> list[Edit] | None:
    """Returns the edits that move a member into the block of its target, which is made if it does not exist."""
    end = _end(text, value)
    if end is None:
        return None
    member = f"{json.dumps(target[-1])}: {text[value:end]}"
    after = _SKIPPED.match(text, end)
    stop = after.end() if after else end
    last = text[stop : stop + 1] != ","
    line = text.rfind("\n", 0, key) + 1
    if last:  # the comma before it goes, too
        comma = text.rstrip().rfind(",", 0, key)
        if comma < 0 or text[comma + 1 : key].strip():
            return None
        gone = (comma, end, "")
    else:
        rest = re.compile(r"[ \t]*\n?").match(text, stop + 1)
        blank = not text[line:key].strip()
        alone = rest is not None and blank and text[rest.end() - 1] == "\n"
        gone = (line if alone else key, rest.end() if rest and alone else stop + 1, "")
    whole = _SKIPPED.match(text)
    inside = (whole.end() if whole else 0) + 1  # behind the first brace; comments before it may have some, too
    if len(target) == 1:
        return [gone, _inserted(text, inside, member)]
    if not document.has(*target[:-1]):
        return [gone, _inserted(text, inside, f"{json.dumps(target[0])}: {{{member}}}")]
    places = document.places.get(target[:-1], [])
    starts = [0, *(line.end() for line in re.finditer("\n", text))]
    key = starts[places[0][0] - 1] + places[0][1] - 1 if places else 0
    opened = re.compile(rf"(?:{_STRING}|\w+)\s*:\s*{{").match(text, key) if places else None
    return [gone, _inserted(text, opened.end(), member)] if opened else None


def _inserted(text: str, at: int, member: str) -> Edit:
    """Puts a member first into the block that opens before `at`, with the indentation of the block's first member."""
    rest = _SKIPPED.match(text, at)
    first = rest.end() if rest else at
    comma = "" if text[first : first + 1] == "}" else ","
    line = text.rfind("\n", at, first)
    indent = text[line:first] if line >= 0 and not text[line:first].strip() else ""
    return (at, at, f"{indent}{member}{comma}{'' if indent or not comma else ' '}")


def _end(text: str, start: int) -> int | None:
    """Returns where the value that starts here ends."""
    if text[start] not in "{[":
        scalar = _SCALAR.match(text, start)
        return scalar.end() if scalar else None
    depth = 0
    for token in re.compile(rf"{_STRING}|[{{}}\[\]]").finditer(text, start):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return None
