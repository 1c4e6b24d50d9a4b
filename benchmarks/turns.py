"""Runs commands at the same time: one after the other computes for a second, while the others are stopped.

The speed of a machine with neighbours changes within seconds by more than what is to be measured. Commands that run one
after the other meet different changes, and those that take turns the same ones. Each command prints when its steps
ended (`ENDS`), and the duration of a step is the time that its command ran in between.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from benchmarks.programs.windows import ENDS, WARM

TURN_S = 1.0
Span = tuple[float, float]
"""When something began and ended, as `time.time` returns it."""


class Running:
    """A command that runs in turns."""

    def __init__(self, command: Sequence[str], folder: Path, env: dict[str, str]) -> None:
        self.spans: list[Span] = []
        """When it ran."""
        self.output: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with this object)
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def turn(self) -> bool:
        """Lets it run for a second. Returns whether it goes on afterwards."""
        # Children first: a launcher that continued before them would find that they are stopped.
        _send(reversed(family(self.process.pid)), signal.SIGCONT)
        started = time.time()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(TURN_S)
        self.spans.append((started, time.time()))
        if self.process.returncode is None:
            self._stop()
        return self.process.returncode is None

    def _stop(self) -> None:
        stopped: set[int] = set()
        while found := [pid for pid in family(self.process.pid) if pid not in stopped]:  # some may just have started
            _send(found, signal.SIGSTOP)
            stopped.update(found)

    def kill(self) -> None:
        """Ends it."""
        _send(family(self.process.pid), signal.SIGKILL)
        self.process.wait()


def run_in_turns(commands: Iterable[Running]) -> None:
    """Lets commands take turns until all have ended."""
    going = list(commands)
    try:
        while going:
            going = [one for one in going if one.turn()]
    finally:
        for one in going:
            one.kill()


def with_times(numbers: dict[str, Any], spans: Sequence[Span]) -> dict[str, float]:
    """Returns the numbers of a command with the step time and the speed that it had while it ran.

    numbers: as the command printed them; its speed is tokens per step divided by its step time.
    """
    ends, others = numbers[ENDS], {name: value for name, value in numbers.items() if name != ENDS}
    lengths = [_overlap(span, spans) for span in itertools.pairwise(ends)][WARM:]
    step_s = statistics.median(lengths)
    tokens = numbers["tokens_per_second"] * numbers["step_ms"] / 1000
    return {**others, "step_ms": 1000 * step_s, "tokens_per_second": tokens / step_s}


def _overlap(span: Span, spans: Sequence[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in spans)


def family(pid: int) -> list[int]:
    """Returns a process and its descendants, parents first."""
    return [pid, *(one for child in _children_of(pid) for one in family(child))]


def _children_of(pid: int) -> Iterator[int]:
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, tasks.read_text(encoding="ascii").split())


def _send(pids: Iterable[int], sent: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, sent)
