"""The commands of docs/guides/launching.md, which tests run as they stand there."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "docs/guides/launching.md").read_text(encoding="utf-8")


def commands(title: str, *holding: str) -> list[str]:
    """The commands of a section, without those of its subsections, that hold all of these words."""
    lines = TEXT.splitlines()
    start = next(number for number, line in enumerate(lines) if line.lstrip("#") == f" {title}") + 1
    end = next((start + number for number, line in enumerate(lines[start:]) if line.startswith("#")), len(lines))
    found = [line.strip() for line in lines[start:end] if line.startswith("    ")]
    found = [line for line in found if all(word in line for word in holding)]
    if not found:
        raise LookupError(f"docs/guides/launching.md, {title}: no command holds {holding}")
    return found
