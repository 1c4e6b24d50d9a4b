"""The commands of docs/guides/launching.md, which tests run unchanged."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs/guides/launching.md").read_text(encoding="utf-8")


def shell_lines(text: str) -> list[str]:
    """Returns the lines of a page's shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def commands(title: str, *holding: str) -> list[str]:
    """Returns the commands of a section, without its subsections, that contain all of these words."""
    section = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", TEXT, flags=re.DOTALL | re.MULTILINE)
    found = [line for line in shell_lines(section[1]) if all(word in line for word in holding)] if section else []
    if not found:
        raise LookupError(f"docs/guides/launching.md, {title}: no command holds {holding}")
    return found
