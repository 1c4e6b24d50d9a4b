"""Automatic fixes: renamed and misplaced keys, switches and numbers written as text, fractional counts.

The text is edited in place, which keeps comments, order and layout. Keys are only moved in JSON, and in Hjson with
braces.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem, itemgetter
from typing import Any

from llmtrain_lint.document import Configuration, NotDeepSpeed, Unreadable
from llmtrain_lint.reading import BYTE_ORDER_MARK, TOKEN, read_configuration
from llmtrain_lint.rules.structure import expected_path, has_type, keys_with_schema, parsed_text
from llmtrain_lint.schema import RENAMED, KeyPath, Node, Schema

Edit = tuple[int, int, str]


@dataclass(frozen=True)
class _Fix:
    """Gives the key at `where` another path, or another value."""

    where: KeyPath
    target: KeyPath
    value: Any
    edits: list[Edit]
    way: int = 0
    """Distinguishes the ways in which the same may be done; the first is the tidiest."""


_STRING = r'"(?:[^"\\\n]|\\.)*+"'
_SCALAR = re.compile(rf"{_STRING}|[^\s,\]}}/#]++")
_SKIPPED = re.compile(r"(?:\s|//[^\n]*|#[^\n]*|/\*.*?\*/)*+", re.DOTALL)


def fix_text(text: str, schema: Schema, yaml: bool = False) -> str:
    """Returns the text with all automatic fixes for a release of DeepSpeed.

    Each is checked: the new text must contain the values that it should, and JSON must remain JSON. Otherwise the fault
    is left alone, as where a comment looks like a part of the object.
    """
    text = text.removeprefix(BYTE_ORDER_MARK)
    document, useless = _read(text, schema, yaml), set[tuple[KeyPath, int]]()
    while document is not None:
        fixes = [one for one in _fixes(text, document, yaml) if (one.where, one.way) not in useless]
        better = _apply_most(text, document, yaml, fixes, useless)
        if better is None:
            break
        text, document = better
    return text


def _apply_most(
    text: str, document: Configuration, yaml: bool, fixes: list[_Fix], useless: set[tuple[KeyPath, int]]
) -> tuple[str, Configuration] | None:
    """Applies as many of the fixes as possible; returns the new text and its content, or None if none of them works.

    Each check reads the whole text, so a half of the fixes is only tried if all of them together fail. useless:
    receives those that fail alone.
    """
    if not fixes:
        return None
    together, changed = _independent(fixes), text
    edits = (edit for fix in together for edit in fix.edits)
    for start, end, new in sorted(edits, key=itemgetter(0, 1), reverse=True):
        changed = changed[:start] + new + changed[end:]
    read = _read(changed, document.schema, yaml)
    if read and _is_expected(read, document, together):
        return changed, read
    if len(fixes) == 1:
        useless.add((fixes[0].where, fixes[0].way))
        return None
    half = len(fixes) // 2
    halves = (_apply_most(text, document, yaml, part, useless) for part in (fixes[:half], fixes[half:]))
    return next(filter(None, halves), None)


def _independent(fixes: list[_Fix]) -> list[_Fix]:
    """Returns fixes that can be applied together: their keys do not enclose each other, their edits do not overlap."""
    chosen: list[_Fix] = []
    taken: list[Edit] = []
    for fix in fixes:
        others = [where for other in chosen for where in (other.where, other.target)]
        is_new = all(a[: len(b)] != b[: len(a)] for a in others for b in (fix.where, fix.target))
        if is_new and all(end <= a or b <= start for start, end, _ in fix.edits for a, b, _ in taken):
            chosen.append(fix)
            taken += fix.edits
    return chosen


def _is_expected(read: Configuration, before: Configuration, fixes: list[_Fix]) -> bool:
    """Whether a changed text contains the values that it should, and is JSON if it was."""
    if (read.strict_json_fault and not before.strict_json_fault) or len(read.repeated) > len(before.repeated):
        return False
    expected = copy.deepcopy(before.values)
    for fix in fixes:
        del reduce(getitem, fix.where[:-1], expected)[fix.where[-1]]
        block = expected
        for key in fix.target[:-1]:
            block = block.setdefault(key, {})
        block[fix.target[-1]] = fix.value
    return _same(read.values, expected)


def _read(text: str, schema: Schema, yaml: bool) -> Configuration | None:
    try:
        read = read_configuration(text, yaml)
        return None if read.accelerate is not None else replace(read, schema=schema)
    except (Unreadable, NotDeepSpeed):
        return None


def _same(values: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether values are equal: NaN equals itself, and 1 is not true."""
    one, other = (json.dumps(each, sort_keys=True, default=str) for each in (values, others))
    return one == other


def _fixes(text: str, document: Configuration, yaml: bool) -> Iterator[_Fix]:
    """Yields the fixes of one fault after the other."""
    starts = [0, *(line.end() for line in re.finditer("\n", text))]
    for where, value, node in keys_with_schema(document):
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
            yield _Fix(where, target, value, [(key, end, f"{quote}{target[-1]}{quote}")])
        elif target and not yaml:
            for way, moved in enumerate(_moves(text, document, starts, key, colon.end(), target)):
                yield _Fix(where, target, value, moved, way)
        elif node is not None and (new := _value(value, node)) is not None:
            old = _SCALAR.match(text, colon.end())
            if old and _is_whole_value(old[0], value):
                yield _Fix(where, where, new, [(old.start(), old.end(), json.dumps(new))])


def _target(where: KeyPath, document: Configuration) -> KeyPath | None:
    """Returns the path at which a key that is unknown here belongs, if it is free and its block exists or is made."""
    named = tuple(RENAMED[where].split(".")) if where in RENAMED and ":" not in RENAMED[where] else None
    target = named or expected_path(where, document)
    if target is None or target in document.schema.other_releases or document.has(*target):
        return None
    is_made = len(target) == 2 and not document.has(target[0])
    return target if is_made or isinstance(document.at(*target[:-1]), dict) else None


def _value(value: Any, node: Node) -> Any:
    """Returns the value that is meant, or None if nothing is wrong or it is unclear."""
    if value == "auto" or has_type(value, node):
        return None
    if isinstance(value, str):
        meant = parsed_text(value, node)
        # DeepSpeed's reader makes an integer of 1.0, up to ten digits.
        return int(meant) if type(meant) is float and meant.is_integer() and abs(meant) < 1e10 else meant
    counts = "int" in node.types and "float" not in node.types
    return int(value) if counts and type(value) is float and 1 <= value < 2**53 else None


def _is_whole_value(token: str, value: Any) -> bool:
    """Whether a token is the whole of a value, which that of YAML's tags, anchors and longer texts is not."""
    try:
        return token.strip("\"'") == value if isinstance(value, str) else float(token) == value
    except ValueError:
        return False


def _moves(
    text: str, document: Configuration, starts: list[int], key: int, value: int, target: KeyPath
) -> Iterator[list[Edit]]:
    """Yields the edits that move a member into the block of its target, which is made if it does not exist.

    The tidiest comes first.
    """
    end = _value_end(text, value)
    if end is None:
        return
    member = f"{json.dumps(target[-1])}: {text[value:end]}"
    if len(target) > 1 and document.has(*target[:-1]):
        places = document.places.get(target[:-1], [])
        block = starts[places[0][0] - 1] + places[0][1] - 1 if places else 0
        opened = re.compile(rf"(?:{_STRING}|\w+)\s*:\s*{{").match(text, block)
    else:
        opened = re.compile(rf"{_SKIPPED.pattern}{{", re.DOTALL).match(text)
        member = f"{json.dumps(target[0])}: {{{member}}}" if len(target) > 1 else member
    if opened is None:
        return
    inserted = _insertion(text, opened.end(), member)
    after = _SKIPPED.match(text, end)
    stop = after.end() if after else end
    line = text.rfind("\n", 0, key) + 1
    blank = not text[line:key].strip()
    if text[stop : stop + 1] != ",":  # it is the last one: the comma before it goes, too
        comma = text.rfind(",", 0, key)
        comments = (token.span() for token in TOKEN.finditer(text, 0, key) if token["comment"])
        if comma >= 0 and not text[comma + 1 : key].strip() and not any(a < comma < b for a, b in comments):
            yield [(comma, end, ""), inserted]
        # A comment may lie between them: the text is Hjson then, which allows a last comma.
        yield [(line if blank else key, end, ""), inserted]
    elif text[end:stop].strip():  # a comment between the value and its comma stays
        yield [(key, end, ""), (stop, stop + 1, ""), inserted]
    else:
        rest = re.compile(r"[ \t]*\r?\n?").match(text, stop + 1)
        alone = rest is not None and blank and text[rest.end() - 1] == "\n"
        yield [(line if alone else key, rest.end() if rest and alone else stop + 1, ""), inserted]


def _insertion(text: str, at: int, member: str) -> Edit:
    """Returns the edit that inserts a member first into a block, which opens before `at`, indented like its others."""
    rest = _SKIPPED.match(text, at)
    first = rest.end() if rest else at
    comma = "" if text[first : first + 1] == "}" else ","
    line = re.search(r"\r?\n[^\S\n]*\Z", text[at:first])
    indent = line[0] if line else ""
    return (at, at, f"{indent}{member}{comma}{'' if indent or not comma else ' '}")


def _value_end(text: str, start: int) -> int | None:
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
