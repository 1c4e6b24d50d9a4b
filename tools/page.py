"""Pages with generated parts: tables in Markdown, and the comments between which they are written."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
Files = dict[str, str | bytes]
"""Path of a file from the root of the repository → what it contains."""


def filled(path: str, **parts: str) -> Files:
    """Returns a page whose generated parts are replaced. Everything outside of their comments is written by hand.

    path: of the page, from the root. parts: name → text, to be put between `<!-- NAME: begin -->` and
    `<!-- NAME: end -->`. Raises a ValueError if the page lacks these comments.
    """
    page = (ROOT / path).read_text(encoding="utf-8")
    for name, text in parts.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{path}: put the lines {begin.strip()} and {end.strip()} where '{name}' belongs")
        page = f"{before}{begin}\n{text.strip()}\n\n{end}{after}"
    return {path: page}


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown. A cell is text in one line, in which each `|` is escaped."""
    lines = [" | ".join(re.sub(r"(?<!\\)\|", r"\|", cell) for cell in cells) for cells in rows]
    head = "".join(f"| {column}".rstrip() + " " for column in columns)
    return f"{head}|\n{'|---' * len(columns)}|\n" + "".join(f"| {line} |\n" for line in lines)


def paragraph(text: str) -> str:
    """Returns a text in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"
