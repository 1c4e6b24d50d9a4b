"""Checks any DeepSpeed JSON for what DeepSpeed would refuse late, or silently ignore."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmtrain.errors import nearest
from llmtrain.plan.schema import REMOVED_KEYS, REMOVED_ZERO_KEYS, TOP_LEVEL_KEYS

LARGEST_FILE = 2**20
"""Bytes; the largest configurations in use are some kilobytes."""

Severity = Literal["error", "warning"]
Where = tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One fault of a configuration file: rule, severity, dotted key and its place (from 1; 0 is unknown)."""

    rule: str
    severity: Severity
    field: str
    message: str
    fix: str = ""
    line: int = 0
    column: int = 0


@dataclass(frozen=True)
class Document:
    """A configuration as read, with the places of its keys."""

    values: dict[str, Any]
    places: dict[Where, list[tuple[int, int]]]
    world_size: int | None


def lint_file(path: Path, world_size: int | None = None) -> list[Finding]:
    """Everything that is wrong with a DeepSpeed configuration file; never raises on what it contains.

    `world_size` is the number of devices, for the batch triangle.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            return [_unreadable(f"is larger than {LARGEST_FILE >> 20} MiB: no DeepSpeed configuration is")]
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        return [_unreadable(f"cannot be read: {error.strerror}")]
    except UnicodeDecodeError as error:
        return [_unreadable(f"is not UTF-8 text (byte {error.start})")]
    return lint_text(text, world_size)


def lint_text(text: str, world_size: int | None = None) -> list[Finding]:
    """As `lint_file`, for the text of a configuration; JSON, or Hjson as DeepSpeed reads it."""
    try:
        values = _parse(text)
    except RecursionError:
        return [_unreadable("is nested too deeply")]
    except ValueError as error:  # of json and of hjson alike
        line, column = getattr(error, "lineno", 0), getattr(error, "colno", 0)
        return [_unreadable(f"is not JSON: {getattr(error, 'msg', error)}", line, column)]
    if not isinstance(values, dict):
        return [_unreadable("holds no JSON object")]
    document = Document(values, _key_places(text), world_size)
    findings = [finding for check in CHECKS for finding in check(document)]
    return sorted(findings, key=lambda finding: (finding.line, finding.column))


def _unreadable(message: str, line: int = 0, column: int = 0) -> Finding:
    return Finding("lint.unreadable", "error", "file", message, line=line, column=column)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        # Comments, unquoted keys and missing commas are Hjson, which DeepSpeed reads. It comes with DeepSpeed.
        import hjson

        return hjson.loads(text)


_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*|/\*.*?\*/)
      |(?P<key>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[A-Za-z_][\w.-]*)(?=\s*:)
      |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      |(?P<bracket>[{}\[\]])""",
    re.VERBOSE | re.DOTALL,
)


def _key_places(text: str) -> dict[Where, list[tuple[int, int]]]:
    """Line and column of every key, by its path; a key that occurs twice has two places."""
    places: dict[Where, list[tuple[int, int]]] = {}
    path: list[str] = []  # the key that each open bracket is the value of
    key, line, line_start, done = "", 1, 0, 0
    for token in _TOKEN.finditer(text):
        start = token.start()
        line += text.count("\n", done, start)
        line_start = text.rfind("\n", done, start) + 1 or line_start
        done = start
        if token["key"]:
            key = token["key"].strip("\"'")
            places.setdefault((*path[1:], key), []).append((line, start - line_start + 1))
        elif token["bracket"] in ("{", "["):
            path.append(key)
        elif token["bracket"] and path:
            path.pop()
    return places


def _find(document: Document, rule: str, where: Where, message: str, fix: str = "") -> Finding:
    line, column = document.places.get(where, [(0, 0)])[-1]
    return Finding(rule, "error", ".".join(where), message, fix, line, column)


def _duplicates(document: Document) -> Iterator[Finding]:
    for where, places in document.places.items():
        if len(places) > 1 and not _in_list(document.values, where):
            first = places[0][0]
            yield _find(document, "lint.duplicate", where, f"is given twice, first in line {first}", "keep one")


def _in_list(values: Any, where: Where) -> bool:
    """Whether a path runs through a list, whose objects repeat their keys."""
    for key in where:
        if not isinstance(values, dict):
            return True
        values = values.get(key)
    return False


def _unknown(document: Document) -> Iterator[Finding]:
    for key in document.values:
        if key not in TOP_LEVEL_KEYS and key not in REMOVED_KEYS:
            message = f"DeepSpeed knows no such key and ignores it{nearest(key, TOP_LEVEL_KEYS)}"
            yield _find(document, "lint.unknown_key", (key,), message)


def _removed(document: Document) -> Iterator[Finding]:
    zero = document.values.get("zero_optimization")
    blocks = [((), REMOVED_KEYS, document.values), (("zero_optimization",), REMOVED_ZERO_KEYS, zero)]
    for prefix, removed, block in blocks:
        for key in block if isinstance(block, dict) else ():
            if key in removed:
                message = "was removed from DeepSpeed, which now refuses it"
                yield _find(document, "lint.removed_key", (*prefix, key), message, removed[key])


def _auto(document: Document) -> Iterator[Finding]:
    for where, value in _leaves(document.values):
        if value == "auto" and where[0] not in ("data_types", "expert_parallel", "autotuning", "compile"):
            message = "'auto' is for the Hugging Face Trainer and Accelerate to fill in; DeepSpeed drops it silently"
            yield _find(document, "lint.auto", where, message, "write the value")


def _leaves(values: dict[str, Any]) -> Iterator[tuple[Where, Any]]:
    """Every value that is no object, with its path. Parsing has bounded the depth."""
    open_: list[tuple[Where, Any]] = [((key,), value) for key, value in values.items()]
    while open_:
        where, value = open_.pop()
        if isinstance(value, dict):
            open_.extend(((*where, str(key)), inner) for key, inner in value.items())
        else:
            yield where, value


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _batch_values(document: Document) -> Iterator[Finding]:
    for key in _BATCH:
        value = document.values.get(key)
        if value is not None and value != "auto" and _batch_number(value) is None:
            message = f"{reprlib.repr(value)} was given: must be a positive integer"
            yield _find(document, "lint.batch_value", (key,), message)


def _batch_number(value: Any) -> int | None:
    """A number that a batch can be made of. The bound keeps products, and messages, of a sane length."""
    return value if type(value) is int and 0 < value < 2**63 else None


def _batch_triangle(document: Document) -> Iterator[Finding]:
    """train = micro × accumulation × data parallel ranks, as DeepSpeed will assert or round."""
    given = [document.values.get(key) for key in _BATCH]
    total, micro, steps = (_batch_number(value) for value in given)
    if given[:2] == [None, None]:
        message = "is missing: DeepSpeed needs it or train_micro_batch_size_per_gpu"
        yield _find(document, "lint.batch_missing", ("train_batch_size",), message)
    if not document.world_size or total is None:
        return
    shared = _batch_number(document.values.get("sequence_parallel_size")) or 1
    ranks, rest = divmod(document.world_size, shared)
    if rest:
        message = f"{shared} ranks share a sequence, which do not divide {document.world_size}"
        yield _find(document, "lint.batch_triangle", ("sequence_parallel_size",), message)
        return
    per_step = (micro or 1) * (steps or 1) * ranks
    if total != per_step if micro and steps else total % per_step:
        message = f"{total} ≠ {micro or 'micro'} × {steps or 'accumulation'} × {ranks} data parallel ranks"
        fix = str(per_step) if micro and steps else f"a multiple of {per_step}"
        yield _find(document, "lint.batch_triangle", ("train_batch_size",), message, fix)


CHECKS: tuple[Callable[[Document], Iterator[Finding]], ...] = (
    _duplicates,
    _unknown,
    _removed,
    _auto,
    _batch_values,
    _batch_triangle,
)
