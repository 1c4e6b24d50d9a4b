"""Writes recipes as files: Python, or YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from llmtrain.plan.load.yaml_file import CoreDumper
from llmtrain.recipe import Part, Recipe, part_in

WIDTH = 100
"""Largest number of characters of a call that is written on one line."""
HINT = "`llmtrain recipe show FILE --all` prints every field."


def recipe_text(
    file: Path, fields: Mapping[str, Any], comments: Mapping[str, str] | None = None, heading: str = ""
) -> str:
    """Returns the text of a recipe file, Python or YAML by its suffix.

    fields: nested, as in YAML, in the order in which they are written. comments: dotted field → comment. heading: lines
    that stand at the top, as comments or as a docstring.
    """
    top, remarks = (heading or HINT), comments or {}
    if file.suffix == ".py":
        body = "\n".join(_call(Recipe, "return ", fields, "", remarks, 4))
        quoted = top.replace("\\", "\\\\").replace('"""', r"\"\"\"")
        return (
            f'"""{quoted}"""\n\nimport llmtrain as lt\n\n\n'
            f"def recipe() -> lt.Recipe:\n{body}\n\n\n"
            'if __name__ == "__main__":\n    lt.main(recipe)\n'
        )
    lines = [*(f"# {line}".rstrip() for line in top.splitlines()), *_yaml_lines(fields, "", "", remarks)]
    return "\n".join(lines) + "\n"


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields by dotted name as nested mappings, in the order in which a recipe declares them."""
    result: dict[str, Any] = {}
    for name, value in fields.items():
        *parts, last = name.split(".")
        inner = result
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return _ordered(result, Recipe)


def _ordered(fields: Mapping[str, Any], part: type[Part]) -> dict[str, Any]:
    order = list(part.model_fields)
    result = {}
    for name in sorted(fields, key=lambda name: order.index(name) if name in order else len(order)):
        inner = part_in(part.model_fields[name].annotation) if name in order else None
        value = fields[name]
        result[name] = _ordered(value, inner) if inner and isinstance(value, Mapping) else value
    return result


def _yaml_lines(fields: Mapping[str, Any], path: str, indent: str, comments: Mapping[str, str]) -> Iterator[str]:
    for name, value in fields.items():
        field = f"{path}{name}"
        comment = _comment(comments.get(field, ""))
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_flow(name)}:{comment}"
            yield from _yaml_lines(value, f"{field}.", f"{indent}  ", comments)
        elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            yield f"{indent}{_flow(name)}:{comment}"
            for number, item in enumerate(value):
                first, *others = _yaml_lines(item, f"{field}.{number}.", f"{indent}    ", comments)
                yield f"{indent}  - {first.lstrip()}"
                yield from others
        else:
            yield f"{indent}{_flow(name)}: {_flow(value)}{comment}"


def _flow(value: Any) -> str:
    """Returns a value as YAML on one line."""
    text: str = yaml.dump(
        value, Dumper=CoreDumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf")
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str) -> str:
    return f"  # {' '.join(text.split())}" if text else ""


def _call(
    part: type[Part], before: str, fields: Mapping[str, Any], path: str, comments: Mapping[str, str], indent: int
) -> list[str]:
    """Returns the lines of the Python call that constructs a part of a recipe. before: what precedes the call."""
    space, inner = " " * indent, " " * (indent + 4)
    arguments: list[list[str]] = []
    for name, value in fields.items():
        field = f"{path}{name}"
        type_of_part = part_in(part.model_fields[name].annotation)
        if type_of_part and isinstance(value, Mapping):
            lines = _call(type_of_part, f"{name}=", value, f"{field}.", comments, indent + 4)
        elif type_of_part and isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            items = [
                _call(type_of_part, "", item, f"{field}.{number}.", comments, indent + 8)
                for number, item in enumerate(value)
            ]
            if len(items) == 1 and len(items[0]) == 1:
                lines = [f"{inner}{name}=[{items[0][0].strip()}]"]
            else:
                lines = [f"{inner}{name}=[", *(line for item in items for line in _with_comma(item)), f"{inner}]"]
        else:
            lines = [f"{inner}{name}={_literal(value)}"]
        arguments.append(_with_comma(lines, _comment(comments.get(field, ""))))
    heading = f"{before}lt.{part.__name__}("
    commented = any("  # " in line for lines in arguments for line in lines)
    if not commented and part is not Recipe and all(len(lines) == 1 for lines in arguments):
        line = f"{space}{heading}{', '.join(lines[0].strip().removesuffix(',') for lines in arguments)})"
        if len(line) <= WIDTH:
            return [line]
    return [f"{space}{heading}", *(line for lines in arguments for line in lines), f"{space})"]


def _with_comma(lines: list[str], comment: str = "") -> list[str]:
    """Returns the lines of an argument with a comma after it, and its comment."""
    if len(lines) == 1:
        return [f"{lines[0]},{comment}"]
    return [f"{lines[0]}{comment}", *lines[1:-1], f"{lines[-1]},"]


def _literal(value: Any) -> str:
    """Returns a value as Python source."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)
