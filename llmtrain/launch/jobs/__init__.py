"""Renders a plan for systems that start the workers themselves: Slurm, Kubernetes, Accelerate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def quoted(text: str) -> str:
    """Quotes a string for YAML."""
    import yaml

    return str(yaml.safe_dump(text, default_style='"', width=math.inf)).strip()


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
