"""Reads YAML with the positions of its keys. Tags, aliases and merge keys are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

MAX_DEPTH = 64
"""Largest depth of nesting."""
KeyPath = tuple[str, ...]
KeyPositions = dict[KeyPath, list[tuple[int, int]]]
"""Line and column of each key by its path, counted from 1; items of lists are numbered from 0. A key that occurs twice
has two positions."""
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class YamlError(ValueError):
    """The text is not YAML, or uses what is not accepted; line and column are 0 if they are unknown."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        self.line = line
        self.column = column
        super().__init__(message)


def parse_yaml(
    text: str, loader: type[yaml.SafeLoader], mapping: Callable[[list[tuple[str, Any]]], Any]
) -> tuple[Any, KeyPositions]:
    """Returns what a text contains, and where its keys are.

    mapping: makes an object of its keys and values. Raises YamlError, also for aliases, which could make a short text
    endless.
    """
    places: KeyPositions = {}
    try:
        depth = 0
        for event in yaml.parse(text, loader):  # lazily, since PyYAML's time is quadratic in the depth
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise YamlError(f"is nested deeper than {MAX_DEPTH} levels")
            if isinstance(event, yaml.AliasEvent):
                raise YamlError("uses YAML aliases, which are not followed", *_line_and_column(event.start_mark))
        made = loader(text)
        node = made.get_single_node()
        return (None if node is None else _value(node, (), places, made, mapping)), places
    except YamlError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or "a value is out of range"
        raise YamlError(f"is not YAML: {reason}", *(_line_and_column(mark) if mark else ())) from None


def _value(
    node: yaml.Node, where: KeyPath, places: KeyPositions, loader: Any, mapping: Callable[[list[tuple[str, Any]]], Any]
) -> Any:
    if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
        raise YamlError(f"uses the YAML tag {node.tag[:80]}", *_line_and_column(node.start_mark))
    if isinstance(node, yaml.MappingNode):
        pairs = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                raise YamlError("has a key that is not a string", *_line_and_column(key.start_mark))
            inner = (*where, str(key.value))
            places.setdefault(inner, []).append(_line_and_column(key.start_mark))
            pairs.append((inner[-1], _value(value, inner, places, loader, mapping)))
        return mapping(pairs)
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return [_value(item, (*where, str(number)), places, loader, mapping) for number, item in items]
    return loader.construct_object(node, deep=True)


def _line_and_column(mark: Any) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1
