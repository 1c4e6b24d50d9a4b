"""Rules for single keys and values: unknown, removed, given twice, of the wrong type, out of range, left "auto"."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

from llmtrain.errors import nearest
from llmtrain.lint.document import Configuration, Where
from llmtrain.lint.rules.rule import Fault, error, warning
from llmtrain.lint.schema import REMOVED_KEYS, REMOVED_ZERO_KEYS, RENAMED, Node, schema

_KINDS = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "list": "a list",
    "object": "an object",
}
_COMMENTS = ("_", "//", "#", "comment")
"""Prefixes of keys that people write comments in; DeepSpeed ignores them at the top level, as intended."""


def _known(document: Configuration) -> Iterator[tuple[Where, Any, Node | None]]:
    """Yields every key in a block of known form, with its value and its schema (None if the key is unknown)."""
    open_: list[tuple[Where, Any, Node]] = [((), document.values, schema().root)]
    while open_:
        where, block, node = open_.pop()
        if node.keys is None or not isinstance(block, dict):
            continue
        for key, value in block.items():
            inner = node.keys.get(key)
            yield (*where, key), value, inner
            if inner is not None:
                open_.append(((*where, key), value, inner))


def _removed_fix(where: Where) -> str | None:
    if len(where) == 1:
        return REMOVED_KEYS.get(where[0])
    return REMOVED_ZERO_KEYS.get(where[1]) if where[0] == "zero_optimization" and len(where) == 2 else None


@error("duplicate", "A key that is given twice: DeepSpeed rejects the file.")
def duplicate(document: Configuration) -> Iterator[Fault]:
    """Reports keys given twice in one object."""
    for where in document.repeated:
        places = document.places.get(where, [])
        first = f", first in line {places[0][0]}" if places else ""
        yield where, f"is given twice{first}", "keep one"


@error(
    "unknown_key",
    "A key that DeepSpeed does not know: ignored at the top level and in some blocks, rejected in others.",
)
def unknown_key(document: Configuration) -> Iterator[Fault]:
    """Reports misspelt and misplaced keys."""
    for where, _, node in _known(document):
        if node is None and _removed_fix(where) is None and not (len(where) == 1 and where[0].startswith(_COMMENTS)):
            yield where, *_stranger(where)


def _stranger(where: Where) -> tuple[str, str]:
    siblings = schema().root
    for key in where[:-1]:
        siblings = (siblings.keys or {})[key]
    block = f"{'.'.join(where[:-1])}" if len(where) > 1 else "DeepSpeed's configuration"
    name = reprlib.repr(where[-1])
    if where in RENAMED:
        return f"{name} is not a key of {block}, and has no effect there", f"move it to {RENAMED[where]}"
    homes = [home for home in schema().homes.get(where[-1], ()) if where[-1] not in ("enabled", "type")]
    if homes:
        return f"{name} is not a key of {block}, and has no effect there", f"move it to {'.'.join(homes[0])}"
    return f"{name} is not a key of {block}{nearest(where[-1][:80], siblings.keys or {})}", ""


@error("removed_key", "A key of a feature that DeepSpeed has removed, and now rejects.")
def removed_key(document: Configuration) -> Iterator[Fault]:
    """Reports keys of removed features, and how to migrate."""
    for where, _, node in _known(document):
        fix = _removed_fix(where) if node is None else None
        if fix is not None:
            yield where, "was removed from DeepSpeed, which now rejects it", fix


@warning("deprecated_key", "A key that has been renamed; DeepSpeed still accepts it, with a warning.")
def deprecated_key(document: Configuration) -> Iterator[Fault]:
    """Warns about renamed keys."""
    for where, _, node in _known(document):
        if node is not None and node.instead is not None:
            yield where, "is deprecated", f"use {node.instead}"


@error(
    "type", 'A value of the wrong type: rejected in validated blocks, misread elsewhere (the string "false" is true).'
)
def wrong_type(document: Configuration) -> Iterator[Fault]:
    """Reports values of the wrong type."""
    for where, value, node in _known(document):
        if node is not None and not _fits(value, node) and value != "auto" and not _old_form(where, value):
            kinds = " or ".join(_KINDS[kind] for kind in node.types)
            yield where, f"{reprlib.repr(value)} was given: must be {kinds}", ""


def _old_form(where: Where, value: Any) -> bool:
    return where == ("zero_optimization",) and isinstance(value, bool)


def _fits(value: Any, node: Node) -> bool:
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


@error("range", "A value out of range, or a word that is not one of the choices.")
def out_of_range(document: Configuration) -> Iterator[Fault]:
    """Reports numbers out of range and unknown choices."""
    for where, value, node in _known(document):
        if node is None or value is None or not _fits(value, node):
            continue
        if node.choices and value != "auto":
            chosen = value.lower() if node.any_case and isinstance(value, str) else value
            choices = [one.lower() for one in node.choices] if node.any_case else node.choices
            if chosen not in choices:
                words = ", ".join(str(one) for one in node.choices)
                yield where, f"{reprlib.repr(value)} was given: must be one of {words}", ""
        elif type(value) in (int, float):
            wrong = _beyond(value, node)
            if wrong:
                yield where, f"{reprlib.repr(value)} was given: must be {wrong}", ""


def _beyond(value: float, node: Node) -> str:
    bounds = (
        (node.ge, "≥", value >= (node.ge or 0)),
        (node.gt, ">", value > (node.gt or 0)),
        (node.le, "≤", value <= (node.le or 0)),
        (node.lt, "<", value < (node.lt or 0)),
    )
    return " and ".join(f"{sign} {bound:g}" for bound, sign, holds in bounds if bound is not None and not holds)


_TRAINER = {
    *(("train_batch_size",), ("train_micro_batch_size_per_gpu",), ("gradient_accumulation_steps",)),
    *(("gradient_clipping",), ("fp16", "enabled"), ("bf16", "enabled")),
    *(("optimizer", "params", key) for key in ("lr", "betas", "eps", "weight_decay")),
    *(
        ("scheduler", "params", key)
        for key in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    ),
    *(
        ("zero_optimization", key)
        for key in (
            "reduce_bucket_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_gather_16bit_weights_on_model_save",
        )
    ),
}
"""Keys that the Hugging Face Trainer (transformers' integrations/deepspeed.py) or Accelerate fill in."""
_OWN = (("data_types", "keep_in_fp32_modules"), ("expert_parallel",), ("autotuning",), ("zero_optimization", "zenflow"))
"""Keys for which DeepSpeed itself gives "auto" a meaning."""


def _autos(document: Configuration) -> Iterator[Where]:
    open_: list[tuple[Where, Any]] = [((str(key),), value) for key, value in document.values.items()]
    while open_:
        where, value = open_.pop()
        if isinstance(value, dict):
            open_.extend(((*where, str(key)), inner) for key, inner in value.items())
        elif value == "auto" and where != ("pipeline", "stages") and not any(where[: len(own)] == own for own in _OWN):
            yield where


@error("auto", 'An "auto" that nobody fills in: DeepSpeed uses the default, or fails on the string.')
def auto(document: Configuration) -> Iterator[Fault]:
    """Reports "auto" if neither the Trainer nor Accelerate fill it in."""
    for where in _autos(document):
        if where not in _TRAINER:
            yield where, "'auto': neither the Hugging Face Trainer nor DeepSpeed fills this in", "write the value"


@warning(
    "auto_trainer", 'An "auto" that the Hugging Face Trainer or Accelerate fills in, but DeepSpeed alone does not.'
)
def auto_trainer(document: Configuration) -> Iterator[Fault]:
    """Warns about "auto" if the Trainer fills it in."""
    for where in _autos(document):
        if where in _TRAINER:
            message = "'auto' is filled in by the Hugging Face Trainer or Accelerate, but not by DeepSpeed itself"
            yield where, message, "write the value if another program uses this file"


RULES = (duplicate, unknown_key, removed_key, deprecated_key, wrong_type, out_of_range, auto, auto_trainer)
