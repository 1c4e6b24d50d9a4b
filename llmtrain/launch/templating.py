"""The texts that launchers are given, from the templates beside this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def quoted(text: str) -> str:
    """A string as YAML has it. JSON's, in halves where a character is beyond the first 65,536, YAML would misread."""
    plain = (one if " " <= one <= "~" and one not in '"\\' else f"\\U{ord(one):08x}" for one in text)
    return f'"{"".join(plain)}"'


def render_template(template: str, **values: Any) -> str:
    """A template of `templates/`, which also knows its own name."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{--",  # bash counts an array's elements by {#
        comment_end_string="--}",
    )
    environment.filters["quoted"] = quoted
    return environment.get_template(template).render(template=template, **values)
