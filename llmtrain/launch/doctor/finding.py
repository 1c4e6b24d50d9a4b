"""The input and the results of the checks of a host."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Level = Literal["ok", "warning", "fault"]
MAX_NAMED = 16
"""Number of hosts or ranks that a line lists."""


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
    """Returns a finding that reports no problem."""
    return Finding(check, "ok", text)


def warning(check: str, text: str, fix: str) -> Finding:
    """Returns a warning: a run may start, but it may be slow or fail later."""
    return Finding(check, "warning", text, fix)


def fault(check: str, text: str, fix: str) -> Finding:
    """Returns a fault: a run does not start, or it fails."""
    return Finding(check, "fault", text, fix)


def listed(names: Sequence[str]) -> str:
    """Formats names as `a, b and c`, or `a, b and 7 more` if there are many."""
    shown = names if len(names) <= MAX_NAMED else [*names[: MAX_NAMED - 1], f"{len(names) - MAX_NAMED + 1} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def readable_seconds(seconds: float) -> str:
    """Formats a short time with three digits, as `1.5 s`, `20 ms` or `300 µs`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


COMMAND_TIMEOUT_S = 30
"""Seconds after which a silent program is considered hung, as nvidia-smi is if a GPU is lost."""


@dataclass(frozen=True)
class HostContext:
    """A host, as a run would see it."""

    env: Mapping[str, str]
    run_root: Path
    """Folder of the run directories."""
    cache: Path
    """Folder of prepared tokens."""
    master: str | None = None
    """Address of rank 0 if a run uses several hosts."""
    devices: tuple[int, ...] = ()
    """The devices that a hostfile assigns to the run; empty without one."""
    sys: Path = field(default_factory=lambda: Path("/sys"))
    """Folder in which the kernel describes devices."""


@dataclass(frozen=True)
class CommandOutput:
    """The output of a program, or the reason why it is missing."""

    text: str = ""
    error: str = ""
    """For example `nvidia-smi is not installed`; empty if it has answered."""


def run_command(*command: str, seconds: float = COMMAND_TIMEOUT_S) -> CommandOutput:
    """Runs a program to its end."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return CommandOutput(error=f"{name} is not installed")
    except OSError as error:
        return CommandOutput(error=f"{name} cannot be run: {error.strerror}")
    except subprocess.TimeoutExpired:
        return CommandOutput(error=f"{name} did not answer within {seconds:.0f} s")
    if done.returncode:
        last = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()][-1:]
        return CommandOutput(error=f"{name} ended with code {done.returncode}: {''.join(last) or 'no message'}")
    return CommandOutput(done.stdout)
