"""Writes docs/reference/recipe.md: every field of a recipe, read from the models themselves.

python tools/render_fields.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

sys.path.insert(0, str(Path(__file__).parent))

from type_names import type_name

from llmtrain.recipe import OptimConfig, Part, Recipe, execution, training
from llmtrain.recipe.parts import field_texts

HEAD = """# Fields of a recipe

Generated from `llmtrain/recipe/` by `python tools/render_fields.py`; do not edit.

Every field can be set on the command line by its dotted name: `--set optim.lr=3e-4`, `--set data.sources.0.weight=2`.
A value that is valid JSON is read as JSON, and any other value as text.
"""
PICTURES: dict[type[Part], str] = {
    OptimConfig: "![The five schedules](../pictures/schedules.svg)\n\nDrawn by `python tools/render_schedules.py`.\n\n",
}
"""The text above the fields of a part."""


def render() -> str:
    """Returns the whole page."""
    declared = [(module.__name__, one) for module in (training, execution) for one in vars(module).values()]
    parts = [one for module, one in declared if isinstance(one, type) and one.__module__ == module]
    return HEAD + "".join(_section(part) for part in [Recipe, *parts])


def _section(part: type[Part]) -> str:
    texts = field_texts(part)
    rows = "".join(_row(name, field, texts.get(name, "")) for name, field in part.model_fields.items())
    summary = (part.__doc__ or "").strip().splitlines()[0]
    picture = PICTURES.get(part, "")
    return f"\n## {part.__name__}\n\n{summary}\n\n{picture}| Field | Type | Default | |\n|---|---|---|---|\n{rows}"


def _row(name: str, field: FieldInfo, text: str) -> str:
    description = _escaped(text).replace("\n", " ")
    return f"| `{name}` | {_type(field)} | {_default(field)} | {description} |\n"


def _type(field: FieldInfo) -> str:
    """Returns the name of a field's type; for a part of the recipe, it links to the fields of that part."""
    name = type_name(field.annotation)
    is_part = isinstance(field.annotation, type) and issubclass(field.annotation, Part)
    return f"[`{name}`](#{name.lower()})" if is_part else f"`{_escaped(name)}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.default is not PydanticUndefined:
        return "its defaults" if isinstance(field.default, Part) else f"`{field.default}`"
    return "`{}`" if field.default_factory else "required"


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs/reference/recipe.md").write_text(render(), encoding="utf-8")
