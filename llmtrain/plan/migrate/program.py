"""What a program, whose settings are translated, has to say about itself, and what it is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.plan.migrate.files import ForeignFile, read_foreign
from llmtrain.plan.migrate.translation import Setting, Translation
from llmtrain.system.untrusted import expanded, is_file

PROCESSES = {"nproc_per_node": "nnodes", "num_gpus": "num_nodes", "num_processes": ""}
"""Option of a launcher for the number of processes → that for the number of machines, if each has so many."""

INCLUDED = re.compile(r"[\w.-]+:(\d+(?:,\d+)*)")
"""Devices of one machine, as DeepSpeed's launcher is told to use them (`--include`)."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a translation starts from."""

    file: ForeignFile
    """The program's own settings."""
    beside: Mapping[str, ForeignFile] = field(default_factory=dict)
    """Program → its file, given beside: `deepspeed`, `accelerate`."""
    devices: int | None = None
    """The number of devices that the user named."""

    def companion(
        self, translation: Translation, program: str, named: Any, shown: str, by: ForeignFile | None = None
    ) -> ForeignFile | None:
        """Returns the settings of another program that a setting holds or names, or that were given beside.

        A name counts from the folder of the file `by`, which has it, and then from the working directory. None, with a
        line about what to do, if there is no such file.
        """
        own = by or self.file
        if isinstance(named, Mapping):
            prefix = f"{shown}."
            lines = {key.removeprefix(prefix): line for key, line in own.lines.items() if key.startswith(prefix)}
            return ForeignFile(path=own.path, values=named, lines=lines)
        if program in self.beside:
            return self.beside[program]
        found = _named(own, named)
        if found is None and isinstance(named, str):
            text = f"the file was not found: pass it, too, as in `llmtrain import {own.path.name} {Path(named).name}`"
            translation.missing(shown, text, named)
        return found

    def world_size(self, translation: Translation) -> int:
        """Returns the number of devices that the settings were written for, and notes where it comes from."""
        if self.devices is not None:
            translation.same("--devices", self.devices)
            return self.devices
        accelerate = self.beside.get("accelerate") or _named(self.file, self.file.launcher.get("config_file"))
        origins = [(self.file, self.file.launcher), *([(accelerate, accelerate.values)] if accelerate else [])]
        for file, values in origins:
            if isinstance(named := values.get("include"), str) and (found := INCLUDED.fullmatch(named)):
                count = found[1].count(",") + 1
                translation.same(f"{file.path.name}: include", named, text=f"{count} devices")
                return count
            for name, machines in PROCESSES.items():
                if count := _count(values.get(name)):
                    several = _count(values.get(machines)) or 1
                    text = f"on {several} machines" if several > 1 else "devices"
                    translation.same(f"{file.path.name}: {name}", count, text=text)
                    return count * several
        text = "1 device is assumed, since nothing says how many there were; the global batch follows from it"
        translation.missing("--devices", f"{text}. For another number, run this command again with --devices N")
        return 1


@dataclass(frozen=True, kw_only=True)
class Program:
    """Another program whose settings are translated."""

    name: str
    """Its name on the command line."""
    title: str
    """Its name as its users write it."""
    marks: frozenset[str]
    """Settings of which a file of the program has at least one, and which the other programs do not have."""
    translate: Callable[[Given], Translation]
    tables: Mapping[str, Iterable[Setting]] = field(default_factory=dict)
    """Heading → settings, as the program's page shows them."""
    page: str = ""
    """Name of its page in docs/guides/coming_from/, whose tables `tools/render.py` writes."""
    includes: frozenset[str] = frozenset()
    """Programs whose settings it has as well, so that it is chosen where they are recognised, too."""
    command: str = ""
    """Pattern of what starts it on a command line, or of the class of its arguments in a Python file."""
    recognise: Callable[[ForeignFile], bool] | None = None
    """Whether a file is for the program, where marks and command do not tell."""
    has_generation_settings: bool = False
    """Whether its files may say how texts are generated, although training does not depend on it."""
    beside: bool = False
    """Whether a file of it may stand beside one of another program."""


def _named(by: ForeignFile, name: Any) -> ForeignFile | None:
    """Returns the settings in a file that another one names, if it is there. Raises as `read_foreign` does."""
    if not isinstance(name, str):
        return None
    paths = (by.path.parent / expanded(name), expanded(name))
    return next((read_foreign(path) for path in paths if is_file(path)), None)


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
