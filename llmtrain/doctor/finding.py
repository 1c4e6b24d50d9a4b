"""The result of a check; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    check: stable id, `GROUP.NAME`. text: what was found, or what is wrong with it. fix: how to fix it; empty if nothing
    is wrong.
    """

    check: str
    level: Level
    text: str
    fix: str = ""

    @property
    def group(self) -> str:
        """The group with which it is shown."""
        return self.check.partition(".")[0]

    def as_dict(self) -> dict[str, str]:
        """Returns the finding as JSON data."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Finding:
        """Restores a finding from `as_dict`."""
        return cls(data["check"], data["level"], data["text"], data["fix"])


def ok(check: str, text: str) -> Finding:
    """Returns a finding that nothing is wrong."""
    return Finding(check, "ok", text)


def warning(check: str, text: str, fix: str) -> Finding:
    """Returns a finding that a run may start, but may be slow or fail later."""
    return Finding(check, "warning", text, fix)


def fault(check: str, text: str, fix: str) -> Finding:
    """Returns a finding that a run fails or will not start."""
    return Finding(check, "fault", text, fix)


def listed(names: list[str]) -> str:
    """Formats names as `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def size(count: float) -> str:
    """Formats a number of bytes for people: `23.4 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
