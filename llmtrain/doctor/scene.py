"""What the checks of a host receive; pure."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAM_S = 30
"""Seconds after which a silent program is considered hung, as nvidia-smi is if a GPU is lost."""


@dataclass(frozen=True)
class Scene:
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
class Answer:
    """The output of a program, or why there is none."""

    text: str = ""
    refusal: str = ""
    """For example `nvidia-smi is not installed`; empty if it has answered."""


def ask(*command: str, seconds: float = PROGRAM_S) -> Answer:
    """Runs a program to its end."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return Answer(refusal=f"{name} is not installed")
    except OSError as error:
        return Answer(refusal=f"{name} cannot be run: {error.strerror}")
    except subprocess.TimeoutExpired:
        return Answer(refusal=f"{name} did not answer within {seconds:.0f} s")
    if done.returncode:
        last = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()][-1:]
        return Answer(refusal=f"{name} ended with code {done.returncode}: {''.join(last) or 'no message'}")
    return Answer(done.stdout)
