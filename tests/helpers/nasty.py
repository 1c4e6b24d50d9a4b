"""Words that shells, launchers and batch systems might misread, and what would show that one of them was executed."""

from __future__ import annotations

import random

CANARY = "executed"
"""An executed word leaves a file of this name in the working folder."""
WORDS = (
    *("", " ", "a b", "it's", '"', "`touch executed`", "$(touch executed)", "; touch executed;", "| touch executed"),
    *("\ntouch executed\n", "'; touch executed; '", '"; touch executed; "', "&& touch executed", "> executed"),
    *("${HOME}", "$HOME", "\\", "\\n", "a\nb", "\n", "-", "--", "-x", "--set", "*", "?", "[a-z]*", "~", "~root", "#"),
    *("a #b", "!", "!!", "&", ";", "|", ">", "%j", "%n", "%h", "%%", "ü", "日本語", "🙂", "\t", "a=b", "'$'\"'", "\r"),
    *("{}", "{a,b}", "\x7f", "\x1b[31m", "$'\\n'", ":", "@", ",", "$$", "$(", "`", "'", "\u2028", "\x85", "é"),
)
HTML = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\"'"
"""A text that a page must not read as markup."""
CHARACTERS = sorted({one for word in WORDS for one in word})


def words(seed: int, count: int = 60) -> list[str]:
    """Returns `WORDS`, and others drawn from their characters and parts; the same ones for the same seed."""
    draw = random.Random(seed)
    drawn = ["".join(draw.choices(CHARACTERS, k=draw.randint(1, 30))) for _ in range(count)]
    joined = ["".join(draw.choices(WORDS, k=3)) for _ in range(count)]
    return [*WORDS, *drawn, *joined]
