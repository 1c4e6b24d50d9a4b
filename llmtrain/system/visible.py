"""Text from models and data on a terminal: control characters are shown, not obeyed."""

from __future__ import annotations

import unicodedata

OBEYED = "\n\t"


def visible(text: str, kept: str = OBEYED) -> str:
    """Returns a text with control and format characters as escapes, except for those of `kept`.

    Format characters include those that reverse the direction of text (CVE-2021-42574).
    """
    if text.isprintable():
        return text
    return "".join(one if one in kept or not _is_control(one) else _escape(one) for one in text)


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
