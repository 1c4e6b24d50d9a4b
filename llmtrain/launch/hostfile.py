"""Hosts of a job in DeepSpeed's format (`host slots=N` on each line), and the choice among them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import Problem, RecipeError
from llmtrain.system.untrusted import UNREADABLE, file_fault, read_text

_LINE = re.compile(r"(?P<host>[A-Za-z0-9_.:-]+)\s+slots=(?P<slots>[0-9]+)")
_FIX = "write one `HOST slots=N` per line, and each host once"


@dataclass(frozen=True)
class Host:
    """A machine, by the name that ssh uses for it."""

    name: str
    devices: tuple[int, ...]
    """Indices of the devices to use, one worker each."""


def read_hosts(path: Path, include: str = "", exclude: str = "") -> list[Host]:
    """Returns the hosts of a hostfile to use, in its order.

    include, exclude: as DeepSpeed's options, `h1@h2:0,2`; only one of them may be given. Raises RecipeError with every
    fault.
    """
    slots = _parse(path)
    if include and exclude:
        raise RecipeError(Problem("launch.filter", "--include", "cannot be combined with --exclude", "use one of them"))
    if not (include or exclude):
        return [Host(name, tuple(range(count))) for name, count in slots.items()]
    option = "--include" if include else "--exclude"
    selected = _parse_filter(include or exclude, option, slots)
    chosen = []
    for name, count in slots.items():
        of_host = selected.get(name, set())
        devices = [device for device in range(count) if (device in of_host) == bool(include)]
        if devices:
            chosen.append(Host(name, tuple(devices)))
    if not chosen:
        raise RecipeError(Problem("launch.filter", option, f"'{include or exclude}' leaves no device", str(path)))
    return chosen


def render_hostfile(hosts: Iterable[Host]) -> str:
    """Returns a hostfile with exactly these hosts, for DeepSpeed."""
    return "".join(f"{host.name} slots={max(host.devices) + 1}\n" for host in hosts)


def include_option(hosts: Iterable[Host]) -> str:
    """Returns the devices of `render_hostfile` to use, as DeepSpeed's `--include`."""
    return "@".join(f"{host.name}:{','.join(map(str, host.devices))}" for host in hosts)


def _parse(path: Path) -> dict[str, int]:
    """Returns host → slots."""
    try:
        lines = read_text(path).splitlines()
    except UNREADABLE as error:
        raise RecipeError(
            Problem("launch.hostfile", "--hostfile", f"cannot read {path}: {file_fault(error)}", _FIX)
        ) from None
    slots: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            message = f"'{text[:60]}' is not HOST slots=N"
        elif match["host"] in slots:
            message = f"names '{match['host']}' twice"
        elif int(match["slots"]) == 0:
            message = f"'{match['host']}' has no slots; leave it out"
        else:
            slots[match["host"]] = int(match["slots"])
            continue
        problems.append(Problem("launch.hostfile", f"{path}:{number}", message, _FIX))
    if not slots and not problems:
        problems.append(Problem("launch.hostfile", str(path), "names no host", _FIX))
    if problems:
        raise RecipeError(problems)
    return slots


def _parse_filter(text: str, option: str, slots: dict[str, int]) -> dict[str, set[int]]:
    """Returns host → devices; a host without a list of devices has all of them."""
    selected: dict[str, set[int]] = {}
    problems = []
    for part in text.split("@"):
        name, colon, indices = part.partition(":")
        devices = indices.split(",") if colon else [str(index) for index in range(slots.get(name, 0))]
        if name not in slots:
            problems.append(f"'{name}' is not in the hostfile")
        elif not all(device.isdecimal() for device in devices):
            problems.append(f"'{part}' is not HOST or HOST:0,2")
        elif unknown := [device for device in devices if int(device) >= slots[name]]:
            problems.append(f"'{name}' has {slots[name]} slots, and no device {', '.join(unknown)}")
        else:
            selected.setdefault(name, set()).update(map(int, devices))
    if problems:
        raise RecipeError(Problem("launch.filter", option, found) for found in problems)
    return selected
