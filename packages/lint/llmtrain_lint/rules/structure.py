"""Rules for single keys and values: unknown, removed, given twice, of the wrong type, out of range."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator
from typing import Any

from llmtrain_lint.document import Configuration, Effect, truth
from llmtrain_lint.rules.rule import Fault, error, key_suggestion, warning
from llmtrain_lint.schema import REMOVED_KEYS, REMOVED_ZERO_KEYS, RENAMED, KeyPath, Node

_KINDS = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "list": "a list",
    "object": "an object",
}
_NEVER_EMPTY = (("autotuning", "results_dir"), ("autotuning", "exps_dir"))
"""Texts that DeepSpeed refuses if they are empty, although it does not validate their block."""
_STRICT_BOOLEAN = (("flops_profiler", "enabled"), ("checkpoint", "parallel_write", "pipeline_stage"))
"""Switches that DeepSpeed does not read from a text, although it does not validate their block."""
_NOT_BOOLEAN = ("loss_scale", "loss_scale_window", "min_loss_scale")
"""Numbers for which DeepSpeed refuses true and false; for others, it reads them as 1 and 0."""
_STRING_LISTS = (
    *(("zero_optimization", "leaf_module", key) for key in ("classes", "names", "name_suffixes")),
    *(("compile", "passes"), ("torch_autocast", "lower_precision_safe_modules")),
    ("data_types", "keep_in_fp32_modules"),
)
"""Lists of texts; for the last one, DeepSpeed gives "auto" a meaning."""
_COMMON = ("enabled", "type", "profile", "dtype")
"""Names of keys in several blocks, or of other programs."""
_MISPLACED = ("zero_optimization", "fp16", "data_types", "activation_checkpointing", "checkpoint", "tensor_parallel")
"""Blocks whose keys are recognised if they are misplaced. A loss scale in bf16 is not: bf16 has no use for it."""
_COMMENTS = ("_", "//", "#", "comment")
"""Prefixes of keys that people write comments in; DeepSpeed ignores them at the top level, as intended."""


def keys_with_schema(document: Configuration) -> Iterator[tuple[KeyPath, Any, Node | None]]:
    """Walks all keys whose block is in the schema; yields path, value and schema (None if the key is unknown)."""
    open_: list[tuple[KeyPath, Any, Node]] = [((), document.values, document.schema.root)]
    while open_:
        where, block, node = open_.pop()
        if node.keys is None or not isinstance(block, dict):
            continue
        for key, value in block.items():
            inner = node.keys.get(key)
            yield (*where, key), value, inner
            if inner is not None:
                open_.append(((*where, key), value, inner))


@error("duplicate", "refuses", "A key that is given twice: DeepSpeed rejects the file, other readers use the last one.")
def duplicate(document: Configuration) -> Iterator[Fault]:
    """Reports keys given twice in one object."""
    for where in document.repeated:
        places = document.places.get(where, [])
        first = f" (first in line {places[0][0]})" if places else ""
        if document.reader == "deepspeed":
            yield where, f"it is given twice{first}", "keep one"
        else:
            yield where, f"it is given twice{first}, and the last one is used", "keep one", "changes"


@error(
    "unknown_key",
    "ignores",
    "A key that DeepSpeed does not know: ignored at the top level and in some blocks, rejected in others.",
)
def unknown_key(document: Configuration) -> Iterator[Fault]:
    """Reports misspelt and misplaced keys."""
    for where, _, node in keys_with_schema(document):
        if node is None and not (len(where) == 1 and where[0].startswith(_COMMENTS)):
            yield where, *_unknown_key_fault(where, document)


def _unknown_key_fault(where: KeyPath, document: Configuration) -> tuple[str, str, Effect]:
    schema = document.schema
    block = schema.root
    for key in where[:-1]:
        block = (block.keys or {})[key]
    inside = ".".join(where[:-1]) or "DeepSpeed's configuration"
    effect: Effect = "refuses" if block.validated else "ignores"
    message = f"{reprlib.repr(where[-1])} is not a key of {inside}"
    if where in RENAMED:
        same = RENAMED[where].rpartition(".")[0] == ".".join(where[:-1])
        return message, f"{'rename' if same else 'move'} it to {RENAMED[where]}", effect
    if where in schema.other_releases:
        first, last = schema.other_releases[where]
        if not schema.since(first):
            return f"{message} before {first}", f"DeepSpeed {first} or later, or remove it", effect
        return f"{message} after {last}", "remove it", effect
    if found := expected_path(where, document):
        return message, f"move it to {'.'.join(found)}", effect
    of_a_block = len(where) == 1 and where[0] in schema.paths_by_name  # thus not a typo
    hint = "" if of_a_block else key_suggestion(where[-1], block.keys or {})
    return message + hint, "" if hint else "remove it", effect


def expected_path(where: KeyPath, document: Configuration) -> KeyPath | None:
    """Returns where a misplaced key belongs, or None if that is not clear."""
    key, schema = where[-1], document.schema
    arguments = {"optimizer": schema.optimizers, "scheduler": schema.schedulers}.get(where[0], {})
    name = document.word(where[0], "type")
    if len(where) == 2 and key in (arguments.get(name) or arguments.get(name.lower()) or ()):
        return where[0], "params", key
    for found in schema.paths_by_name.get(key, ()) if key not in _COMMON else ():
        inside = found[0] == where[0] or (len(found) <= 2 and found[0] in _MISPLACED)
        if len(found) == 1 or (inside and where[0] not in ("bf16", "bfloat16")):
            return found
    return None


@warning("unread_key", "ignores", "A key that DeepSpeed accepts, but never reads.")
def unread_key(document: Configuration) -> Iterator[Fault]:
    """Warns about keys that have no effect whatever the rest of the file."""
    if document.has("disable_allgather"):
        yield ("disable_allgather",), "nothing reads it", "remove it"


@error("removed_key", "refuses", "A key of a feature that DeepSpeed has removed, and now rejects.")
def removed_key(document: Configuration) -> Iterator[Fault]:
    """Reports keys of removed features, and how to migrate."""
    for where, _, node in keys_with_schema(document):
        if node is not None and node.removed:
            fix = (REMOVED_KEYS if len(where) == 1 else REMOVED_ZERO_KEYS).get(where[-1], "remove it")
            yield where, "the feature was removed", fix


@warning(
    "deprecated_key",
    "allows",
    "A key that has been renamed, or ZeRO as a switch; DeepSpeed still accepts it, with a warning.",
)
def deprecated_key(document: Configuration) -> Iterator[Fault]:
    """Warns about renamed keys, and about the form of ZeRO's block before it had stages."""
    if document.at("zero_optimization") is True:
        yield ("zero_optimization",), "a switch in place of the block is deprecated", '{"stage": 1}, as it is read'
    for where, _, node in keys_with_schema(document):
        if node is not None and node.instead is not None:
            yield where, "it is deprecated", f"use {node.instead}"


@error("type", "misreads", 'A value of the wrong type; in blocks that are not validated, the string "false" is true.')
def wrong_type(document: Configuration) -> Iterator[Fault]:
    """Reports values of the wrong type."""
    for where, value, node in keys_with_schema(document):
        if node is None or value == "auto" or _is_alternative_form(where, value, document):
            continue
        if where in _STRING_LISTS and not (_is_string_list(value) or (value is None and node.null)):
            yield where, f"{reprlib.repr(value)} is not a list of strings", "a list of strings", "refuses"
        elif not has_type(value, node) and not _is_converted(where, value, node):
            kinds = " or ".join(_KINDS[kind] for kind in node.types)
            spelled = parsed_text(value, node)
            fix = kinds if spelled is None else json.dumps(spelled)
            yield where, f"{reprlib.repr(value)} is not {kinds}", fix, _effect(where, value, node)


def _effect(where: KeyPath, value: Any, node: Node) -> Effect:
    """Returns what DeepSpeed does with a value of the wrong type."""
    number = "int" in node.types or "float" in node.types
    if isinstance(value, bool) and number and where[-1] not in _NOT_BOOLEAN:
        return "misreads"  # true is read as 1, false as 0
    if where in _NEVER_EMPTY:
        return "misreads" if value else "refuses"
    asserted = node.validated or node.choices or node.types == ("object",) or where in _STRICT_BOOLEAN
    return "refuses" if asserted else "misreads"


@warning("text_value", "allows", "A number or a switch that is written as a string; DeepSpeed still converts it.")
def text_value(document: Configuration) -> Iterator[Fault]:
    """Warns about texts that are read correctly."""
    for where, value, node in keys_with_schema(document):
        if node is not None and value != "auto" and not has_type(value, node) and _is_converted(where, value, node):
            yield where, f"{reprlib.repr(value)} is text", json.dumps(parsed_text(value, node))


def parsed_text(value: Any, node: Node) -> bool | int | float | None:
    """Parses a text as the boolean or number that its key expects; None if it is none."""
    if not isinstance(value, str) or len(value) > 40:
        return None
    if node.choices:  # pydantic converts to enumerations of integers only
        return next((one for one in node.choices if type(one) is int and str(one) == value.strip()), None)
    if "bool" in node.types:
        return truth(value)
    if "int" in node.types and re.fullmatch(r"\s*[+-]?\d+\s*", value, re.ASCII):
        return int(value)
    spelled = re.fullmatch(r"\s*[+-]?\d+(\.\d*)?([eE][+-]?\d\d?)?\s*", value, re.ASCII)
    return float(value) if "float" in node.types and spelled else None


def _is_converted(where: KeyPath, value: Any, node: Node) -> bool:
    """Whether DeepSpeed reads a text as the number or switch that it spells; outside pydantic, any text is true."""
    spelled = parsed_text(value, node)
    return spelled is not None and (node.validated or (spelled is True and where not in _STRICT_BOOLEAN))


def _is_alternative_form(where: KeyPath, value: Any, document: Configuration) -> bool:
    """Whether DeepSpeed reads a value correctly although its type is not the usual one."""
    if where == ("bf16",) and value is None:
        return document.since("0.17.1")
    if where[:2] == ("zero_optimization", "leaf_module"):
        return isinstance(value, str if len(where) > 2 else type(None))
    if where in (("aio",), ("expert_parallel",)) and value is None:
        return True
    return where == ("zero_optimization",) and isinstance(value, bool)


def _is_string_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def has_type(value: Any, node: Node) -> bool:
    """Whether a value has one of the types of its key."""
    if value is None:
        return node.null or not node.types
    return not node.types or any(_is(value, kind) for kind in node.types)


def _is(value: Any, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool) or (type(value) in (int, float) and value in (0, 1))
    if kind == "int":  # DeepSpeed's own documentation writes integers as 5e8
        return type(value) is int or (type(value) is float and value.is_integer())
    if kind == "float":
        return type(value) in (int, float)
    return isinstance(value, {"str": str, "list": list, "object": dict}[kind])


@error("range", "refuses", "A value out of range, or a word that is not one of the choices.")
def out_of_range(document: Configuration) -> Iterator[Fault]:
    """Reports numbers out of range and unknown choices."""
    for where, value, node in keys_with_schema(document):
        if node is None or value is None:
            continue
        if not has_type(value, node):
            spelled = parsed_text(value, node)
            if node.choices or spelled is None or not _is_converted(where, value, node):
                continue
            value = spelled
        if node.choices and value != "auto":
            chosen = value.lower() if node.any_case and isinstance(value, str) else value
            choices = [one.lower() for one in node.choices] if node.any_case else node.choices
            if chosen not in choices:
                words = ", ".join(str(one) for one in node.choices)
                yield where, f"{reprlib.repr(value)} is not one of its values", f"one of {words}"
        elif type(value) in (int, float):
            wrong = _broken_bounds(value, node)
            effect: Effect = "refuses" if node.validated else "misreads"
            if wrong:
                yield where, f"{reprlib.repr(value)} is out of range", f"a number {wrong}", effect


def _broken_bounds(value: float, node: Node) -> str:
    bounds = (
        (node.ge, "≥", value >= (node.ge or 0)),
        (node.gt, ">", value > (node.gt or 0)),
        (node.le, "≤", value <= (node.le or 0)),
        (node.lt, "<", value < (node.lt or 0)),
    )
    return " and ".join(f"{sign} {bound:g}" for bound, sign, holds in bounds if bound is not None and not holds)
