"""docs/guides/coming_from/: what becomes of each setting of another program, by the tables that translate it."""

from __future__ import annotations

import re
from itertools import groupby

from llmtrain.plan.migrate.programs import PROGRAMS
from llmtrain.plan.migrate.translation import Setting
from llmtrain.recipe import Recipe
from tools.page import Files, filled, table

FOLDER = "docs/guides/coming_from"
FIELD = re.compile(
    rf"(?<![`\w.])((?:{'|'.join(Recipe.model_fields)})\.[a-z_0-9]+(?:\.[a-z_0-9]+)*(?:=[\w.\-\[\],]*\w)?)(?!`)"
)
"""A field of a recipe in a text, which may have a value."""


def files() -> Files:
    """Returns the pages, with the tables of each program."""
    pages: Files = {}
    for page, tables in {program.page: program.tables for program in PROGRAMS.values() if program.page}.items():
        parts = [f"### {heading}\n\n{_table(tuple(rows))}" for heading, rows in tables.items()]
        pages |= filled(f"{FOLDER}/{page}.md", settings="\n".join(parts))
    return pages


def _table(rows: tuple[Setting, ...]) -> str:
    """Returns a table in which neighbours that only have a reason, and the same one, share a row."""
    groups = groupby(map(_cells, rows), key=lambda cells: cells[1:] if not cells[1] else cells)
    joined = (list(group) for _, group in groups)
    return table(
        ("Setting", "Recipe", ""), ((", ".join(cells[0] for cells in group), *group[0][1:]) for group in joined)
    )


def _cells(row: Setting) -> tuple[str, str, str]:
    field = f"`{row.field}`" if row.field else ""
    parts = [row.joint or row.different or row.unsupported or row.harmless, _values(row), _default(row)]
    older = "earlier releases" if row.older else ""
    return f"`{row.key}`", field, FIELD.sub(r"`\1`", "; ".join(part for part in (*parts, older) if part))


def _values(row: Setting) -> str:
    """Returns which value becomes which, unless all keep their names."""
    values = {_name(theirs): _name(ours) for theirs, ours in (row.values or {}).items()}
    if all(theirs == ours for theirs, ours in values.items()):
        return ", ".join(f"`{name}`" for name in values)
    groups: dict[str, list[str]] = {}
    for theirs, ours in values.items():
        groups.setdefault(ours, []).append(f"`{theirs}`")
    return "; ".join(f"{', '.join(theirs)}: `{ours}`" for ours, theirs in groups.items())


def _default(row: Setting) -> str:
    if row.default is None or row.joint:
        return ""
    return f"the default is {row.default:g}" if isinstance(row.default, float) else f"the default is {row.default}"


def _name(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
