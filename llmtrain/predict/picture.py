"""SVG pictures of a plan: the few elements that they consist of."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

ROW = 22
"""Height of a row, with the space below it."""
LEFT = 64
"""x coordinate of the rows, to the right of their names."""
WIDEST = 7
"""Approximate width of a letter of the title."""
DARK, GREY = "#222222", "#e4e4e4"


def picture(width: float, height: float, title: str, elements: Iterable[str]) -> str:
    """Returns the whole document: white, with its title on top; wider than `width` if the title needs it."""
    width = max(width, 16 + WIDEST * len(title))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="9">'
    )
    return "\n".join((head, box(0, 0, width, height, "white"), text(8, 18, title, size=13), *elements, "</svg>")) + "\n"


def row_name(y: float, name: str) -> str:
    """Returns the name of the row that begins at `y`."""
    return text(8, y + 14, name)


def box(x: float, y: float, width: float, height: float, fill: str, tooltip: str = "") -> str:
    """Returns a rectangle; tooltip: shown by a browser."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"'
    return f"<rect {place}><title>{escape(tooltip)}</title></rect>" if tooltip else f"<rect {place}/>"


def text(x: float, y: float, content: str, *, fill: str = DARK, anchor: str = "start", size: int | None = None) -> str:
    """Returns a line of text; y: its base line, anchor: which part of it is at x."""
    given = f' font-size="{size}"' if size else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}"{given}>{escape(content)}</text>'


def bar_label(x: float, y: float, width: float, content: str, fill: str) -> str:
    """Returns a figure in the middle of a box of a row."""
    return text(x + width / 2, y + 13, content, fill=fill, anchor="middle")


def line(x: float, top: float, bottom: float, colour: str) -> str:
    """Returns a vertical line from top to bottom."""
    return f'<line x1="{x:g}" y1="{top:g}" x2="{x:g}" y2="{bottom:g}" stroke="{colour}" stroke-width="1.5"/>'
