"""What a check has found; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    check: stable id, `GROUP.NAME`.
    text: what is there, or what is wrong with it.
    fix: how to mend it; empty where nothing is wrong.
    """

    check: str
    level: Level
    text: str
    fix: str = ""

    @property
    def group(self) -> str:
        """What it is shown with."""
        return self.check.partition(".")[0]

    def as_dict(self) -> dict[str, str]:
        """As JSON data."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Finding:
        """The reverse of `as_dict`."""
        return cls(data["check"], data["level"], data["text"], data["fix"])


def ok(check: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, "ok", text)


def warning(check: str, text: str, fix: str) -> Finding:
    """A run may start, and may be slow, or fail later."""
    return Finding(check, "warning", text, fix)


def fault(check: str, text: str, fix: str) -> Finding:
    """A run fails, or will not start."""
    return Finding(check, "fault", text, fix)


def listed(names: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def size(count: float) -> str:
    """Bytes, as people read them: `23.4 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
