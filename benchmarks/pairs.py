"""Runs commands alternately (A B A B), each in a new process, and summarizes the numbers that they print."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.programs.windows import ENDS
from benchmarks.turns import Running, run_in_turns, with_times
from llmtrain.system.host import CoreMeter

ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36
"""The constant from linux/prctl.h."""
OTHERS = "cores_used_by_others"
"""Key in each run's numbers for the number of cores that other processes used meanwhile."""
Numbers = dict[str, float]


@dataclass(frozen=True)
class Side:
    """A command that measures itself, and prints a JSON object of numbers as its last line."""

    name: str
    command: Sequence[str]
    """`python` stands for the running interpreter, `{work}` for a folder that all commands of a benchmark share."""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Sides that are compared. The first one is llmtrain's."""

    name: str
    sides: Sequence[Side]
    setup: Sequence[Side] = ()
    """Commands that run once before the measurement, without being measured."""


class SideFailedError(Exception):
    """A command failed or printed no numbers."""


def run_case(case: Case, pairs: int, work: Path, say: Callable[[str], None], in_turns: bool = False) -> dict[str, Any]:
    """Runs all sides, and returns their runs and summaries. in_turns: at the same time. Raises SideFailedError."""
    for one in case.setup:
        say(f"{case.name}: {one.name}")
        _run(one, work)
    runs: dict[str, list[Numbers]] = {side.name: [] for side in case.sides}
    for number in range(1, pairs + 1):
        together = iter(measured_in_turns(case.sides, work)) if in_turns else None
        for side in case.sides:
            runs[side.name].append(next(together) if together else measured(side, work))
            say(f"{case.name}, {number} of {pairs}: {side.name}: {_told(runs[side.name][-1])}")
    return {
        "name": case.name,
        "sides": [
            {
                "name": side.name,
                "command": " ".join(side.command),
                "env": side.env,
                "runs": runs[side.name],
                "summary": summary(runs[side.name]),
            }
            for side in case.sides
        ],
        "against": {side.name: against(runs[case.sides[0].name], runs[side.name]) for side in case.sides[1:]},
    }


def measured(side: Side, work: Path) -> Numbers:
    """Runs a side once, and returns its numbers. Raises SideFailedError."""
    _adopt_orphans()
    before = _children()
    meter = CoreMeter()
    output = _run(side, work)
    _reap_orphans(before)
    numbers = {name: value for name, value in _numbers(side, output).items() if name != ENDS}
    return {**numbers, OTHERS: round(meter.cores_used_by_others(), 3)}


def measured_in_turns(sides: Sequence[Side], work: Path) -> list[Numbers]:
    """Runs sides once, in turns of a second (`benchmarks.turns`); returns their numbers. Raises SideFailedError."""
    _adopt_orphans()
    before = _children()
    meter = CoreMeter()
    running = [Running(_command(side, work), ROOT, _environment(side, work)) for side in sides]
    run_in_turns(running)
    _reap_orphans(before)
    of_others = {OTHERS: round(meter.cores_used_by_others(), 3)}
    found = []
    for side, one in zip(sides, running, strict=True):
        one.output.seek(0)
        output = one.output.read()
        if one.process.returncode:
            raise SideFailedError(_failed(side, one.process.returncode, output))
        found.append({**with_times(_numbers(side, output), one.spans), **of_others})
    return found


def _numbers(side: Side, output: str) -> dict[str, Any]:
    lines = output.strip().splitlines()
    try:
        numbers: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise SideFailedError(f"{side.name}: the last line is no JSON: {lines[-1:]}") from None
    return numbers


def _adopt_orphans() -> None:
    """Makes processes whose parents end (as in a browser) children of this one, so they do not count as others."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _children() -> set[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text(encoding="ascii").split()}


def _reap_orphans(before: set[int]) -> None:
    """Waits up to five seconds for new children, because the CPU time of a child only counts once it has ended."""
    until = time.monotonic() + 5
    while time.monotonic() < until and (orphans := _children() - before):
        for orphan in orphans:
            os.waitpid(orphan, os.WNOHANG)
        time.sleep(0.01)


def _run(side: Side, work: Path) -> str:
    command, env = _command(side, work), _environment(side, work)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SideFailedError(_failed(side, done.returncode, done.stdout + done.stderr))
    return done.stdout


def _command(side: Side, work: Path) -> list[str]:
    return [sys.executable if part == "python" else part.replace("{work}", str(work)) for part in side.command]


def _environment(side: Side, work: Path) -> dict[str, str]:
    own = {"PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", "LLMTRAIN_CACHE": str(work / "cache")}
    return {**os.environ, **own, **side.env}


def python_path() -> str:
    """Returns PYTHONPATH with this repository in front of what it already has."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _failed(side: Side, code: int, output: str) -> str:
    tail = "\n".join(output.strip().splitlines()[-15:])
    return f"{side.name}: exit code {code} of {' '.join(side.command)}\n{tail}"


def summary(runs: Sequence[Numbers]) -> dict[str, Numbers]:
    """Returns median, minimum and maximum of each number over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: spread([run[name] for run in runs if name in run]) for name in names}


def spread(values: Sequence[float]) -> Numbers:
    """Returns median, minimum and maximum."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def against(ours: Sequence[Numbers], peer: Sequence[Numbers]) -> dict[str, Numbers]:
    """Returns the summary of the pairwise ratios of ours to the peer's, for each number that both have."""
    names = [name for name in ours[0] if name in peer[0] and name != OTHERS]
    pairs = {
        name: [mine[name] / other[name] for mine, other in zip(ours, peer, strict=True) if other[name]]
        for name in names
    }
    return {name: spread(ratios) for name, ratios in pairs.items() if ratios}


def _told(numbers: Numbers) -> str:
    return ", ".join(f"{name} {value:.5g}" for name, value in numbers.items())
