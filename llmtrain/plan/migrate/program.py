"""What a program, whose settings are translated, has to say about itself, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from llmtrain.plan.migrate.files import ForeignFile
from llmtrain.plan.migrate.translation import Setting, Translation


PROCESSES = {"nproc_per_node": "nnodes", "num_gpus": "num_nodes", "num_processes": ""}
"""Option of a launcher for the number of processes → that for the number of machines, if each has so many."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a translation starts from."""

    file: ForeignFile
    """The program's own settings."""
    beside: Mapping[str, ForeignFile] = field(default_factory=dict)
    """Program → its file, given beside: `deepspeed`, `accelerate`."""
    devices: int | None = None
    """The number of devices that the user named."""

    def world_size(self, translation: Translation) -> int:
        """Returns the number of devices that the settings were written for, and notes where it comes from."""
        if self.devices is not None:
            translation.same("--devices", self.devices)
            return self.devices
        origins = [(self.file, self.file.launcher)]
        if "accelerate" in self.beside:
            origins.append((self.beside["accelerate"], self.beside["accelerate"].values))
        for file, values in origins:
            for name, machines in PROCESSES.items():
                if count := _count(values.get(name)):
                    translation.same(f"{file.path.name}: {name}", count)
                    return count * (_count(values.get(machines)) or 1)
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
    includes: frozenset[str] = frozenset()
    """Programs whose settings it has as well, so that it is chosen where they are recognised, too."""
    command: str = ""
    """Pattern of what starts it on a command line, or of the class of its arguments in a Python file."""
    beside: bool = False
    """Whether a file of it may stand beside one of another program."""


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
