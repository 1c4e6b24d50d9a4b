"""Pages that list what the code declares: commands, fields of a recipe, rules of legality, and overrides."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.main import get_command

from llmtrain.cli import app
from llmtrain.overrides import OVERRIDES, TRIED
from llmtrain.plan.rules import ENGINE, RULES
from llmtrain.recipe import OptimConfig, Part, Recipe, execution, training
from llmtrain.recipe.parts import field_texts
from tools.page import ROOT, Files, filled, table

PICTURES: dict[type[Part], str] = {OptimConfig: "![The five schedules](../pictures/schedules.svg)\n\n"}
"""What is shown above the fields of a part."""
EVIDENCE = {
    "run": "run, and compared with plain torch",
    "read": "read in its source",
    "arithmetic": "arithmetic",
}


def cli() -> Files:
    """Returns the page of the command line: every command with its arguments and options."""
    sections = (_command(name, command) for name, command in _commands("llmtrain", get_command(app)))
    return filled("docs/reference/cli.md", cli="\n".join(sections))


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yields the full names and the commands of a group and of its subgroups."""
    for part, inner in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {part}", inner)
    if not hasattr(command, "commands"):
        yield name, command


def _command(name: str, command: Any) -> str:
    arguments = " ".join(_argument(one) for one in command.params if one.param_type_name == "argument")
    usage = f"## {name}\n\n```text\n{name} {arguments} [OPTIONS]\n```\n\n{_plain(command.help)}\n\n"
    annotations = get_type_hints(command.callback)
    return usage + table(("", "Type", "Default", ""), (_option(one, annotations[one.name]) for one in command.params))


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).removesuffix("…")
    shown = f"{name}..." if parameter.nargs != 1 or parameter.multiple else name
    return str(shown if parameter.required else f"[{shown}]")


def _option(parameter: Any, annotation: Any) -> tuple[str, ...]:
    option = parameter.param_type_name == "option"
    name = ", ".join([*parameter.opts, *parameter.secondary_opts]) if option else _argument(parameter)
    kind = "flag" if annotation is bool else parameter.metavar if option else None
    kind = kind or type_name(annotation).removesuffix(" | None")
    default = "" if parameter.default in (None, "", False, []) else f"`{parameter.default}`"
    return f"`{name}`", f"`{kind}`", "required" if parameter.required else default, _plain(parameter.help)


def _plain(text: str | None) -> str:
    """Returns help text without the markers that make typer keep line breaks."""
    return (text or "").replace("\b\n", "").replace("\n\n", "\0").replace("\n", " ").replace("\0", "\n\n").strip()


def recipe() -> Files:
    """Returns the page of the fields of a recipe, with a table for each of its parts."""
    declared = [(module.__name__, one) for module in (training, execution) for one in vars(module).values()]
    classes = [one for module, one in declared if isinstance(one, type) and one.__module__ == module]
    parts: list[type[Part]] = [Recipe, *(one for one in classes if issubclass(one, Part))]
    return filled("docs/reference/recipe.md", recipe="\n".join(map(_part, parts)))


def _part(part: type[Part]) -> str:
    texts = field_texts(part)
    rows = (
        (f"`{name}`", _type(field), _default(field), texts.get(name, "").replace("\n", " "))
        for name, field in part.model_fields.items()
    )
    summary = (part.__doc__ or "").strip().splitlines()[0]
    return f"## {part.__name__}\n\n{summary}\n\n{PICTURES.get(part, '')}" + table(
        ("Field", "Type", "Default", ""), rows
    )


def _type(field: FieldInfo) -> str:
    """Returns the name of a field's type; for a part of the recipe, it links to the fields of that part."""
    name = type_name(field.annotation)
    is_part = isinstance(field.annotation, type) and issubclass(field.annotation, Part)
    return f"[`{name}`](#{name.lower()})" if is_part else f"`{name}`"


def _default(field: FieldInfo) -> str:
    if field.default is not PydanticUndefined:
        return "its defaults" if isinstance(field.default, Part) else f"`{field.default}`"
    return "`{}`" if field.default_factory else "required"


def type_name(annotation: Any) -> str:
    """Returns an annotation as pages show it: `int | None`, `tuple[float, float]`, `none | cosine`.

    It has no constraints, modules and quotes, and a Literal is replaced by its values.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is types.NoneType:
        return "None"
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " | ".join(map(type_name, arguments))
    if annotation is ...:
        return "..."
    if origin is not None:
        return f"{'list' if origin.__name__ == 'Sequence' else origin.__name__}[{', '.join(map(type_name, arguments))}]"
    return getattr(annotation, "__name__", str(annotation))


def rules() -> Files:
    """Returns the page of the rules of legality."""
    rows = ((f"`{rule.id}`{'' if rule.refuses else ' (note)'}", rule.text, EVIDENCE[rule.evidence]) for rule in RULES)
    observed = f"The engine's behaviour was observed on {ENGINE}.\n\n"
    listed = table(("Rule", "What it refuses, and why", "Evidence"), rows)
    return filled("docs/reference/rules.md", rules=observed + listed)


def overrides() -> Files:
    """Returns the page of what llmtrain replaces in other libraries."""
    sections = []
    for package, version in TRIED.items():
        module = f"llmtrain/overrides/{package}.py"
        rows = (
            ("<br>".join(f"`{place.replace(':.', ':')}`" for place in one.places), one.why, f"`{one.test}`", _link(one))
            for one in OVERRIDES
            if one.package == package
        )
        if (ROOT / module).exists():
            listed = table(("Part", "Without it", "Test", "Upstream"), rows)
            sections.append(f"## {package} {version}\n\nIn [`{module}`](../../{module}).\n\n{listed}")
    return filled("docs/design/overrides.md", overrides="\n".join(sections))


def _link(override: Any) -> str:
    repository, _, number = override.upstream.partition("#")
    return f"[{override.upstream}](https://github.com/{repository}/issues/{number})" if number else "none known"
