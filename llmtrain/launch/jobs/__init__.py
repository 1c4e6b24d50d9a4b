"""Renders a plan for systems that start the workers themselves: Slurm, Kubernetes, Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def quoted(text: str) -> str:
    """Quotes a string for YAML. JSON's escapes would not do: YAML misreads its surrogate pairs beyond U+FFFF."""
    plain = (
        character if " " <= character <= "~" and character not in '"\\' else f"\\U{ord(character):08x}"
        for character in text
    )
    return f'"{"".join(plain)}"'


def render_template(template: str, **values: Any) -> str:
    """Renders a template of `templates/`, which also receives its own name."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{--",  # bash writes the length of an array as {#
        comment_end_string="--}",
    )
    environment.filters["quoted"] = quoted
    return environment.get_template(template).render(template=template, **values)
