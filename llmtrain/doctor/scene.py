"""What the checks of a host are given; pure."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAM_S = 30
"""A program that is asked and says nothing for so long has hung: nvidia-smi does, where a GPU is lost."""


@dataclass(frozen=True)
class Scene:
    """A host, as a run would see it."""

    env: Mapping[str, str]
    run_root: Path
    """Where runs are made."""
    cache: Path
    """Where prepared tokens lie."""
    master: str | None = None
    """Address of rank 0 where a run is on several hosts."""
    devices: tuple[int, ...] = ()
    """Those that a hostfile gives to the run; empty without one."""
    sys: Path = field(default_factory=lambda: Path("/sys"))
    """Where the kernel tells of devices."""


@dataclass(frozen=True)
class Answer:
    """What a program has said, or why it said nothing."""

    text: str = ""
    refusal: str = ""
    """`nvidia-smi is not installed`; empty where it has answered."""


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
        return Answer(refusal=f"{name} ended with code {done.returncode}: {''.join(last) or 'it said nothing'}")
    return Answer(done.stdout)
