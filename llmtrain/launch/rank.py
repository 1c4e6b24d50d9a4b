"""A worker among all of them, and the variables that tell which one it is; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from llmtrain.errors import Problem

T = TypeVar("T")

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Rank:
    """One worker among all of them, and where they meet."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str
    """Name of the `Launcher` it was read from."""
    nodes: int | None = None
    """Machines; None where the launcher does not tell."""

    @property
    def shape(self) -> tuple[int, int]:
        """Nodes and workers of each, the same for all ranks. Where nodes differ, each worker counts as a node."""
        if self.nodes is None:
            return self.world_size // self.local_world_size, self.local_world_size
        if self.world_size % self.nodes:
            return self.world_size, 1
        return self.nodes, self.world_size // self.nodes

    @property
    def on_one_machine(self) -> bool:
        """Whether all workers are on this machine, so that nothing need be reached from another."""
        return self.local_world_size >= self.world_size

    @property
    def is_main(self) -> bool:
        """Whether this worker speaks to the user and writes what is written once."""
        return self.rank == 0


@dataclass(frozen=True)
class Launcher:
    """How one launcher, or whatever started it, describes a worker."""

    name: str
    markers: tuple[str, ...]
    """Variables that only this launcher sets; one of them is enough to recognise it."""
    rank: str = "RANK"
    """Its variables, by what they tell."""
    local_rank: str = "LOCAL_RANK"
    world_size: str = "WORLD_SIZE"
    local_world_size: str = "LOCAL_WORLD_SIZE"
    master_addr: str = "MASTER_ADDR"
    master_port: str = "MASTER_PORT"


TELLING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables by which a worker is known as one, for messages."""
FIX = "start it with a launcher that sets all of them, or unset RANK, WORLD_SIZE and LOCAL_RANK to start workers here"
FIRST_PORT, PORTS = 20000, 10000
"""Rank 0 listens on a port of this range where nobody chose one: every job on another."""


class Reader:
    """Reads variables and collects what is wrong with them."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.problems: list[Problem] = []

    def text(self, name: str) -> str:
        """A variable that must be there."""
        value = self.env.get(name, "").strip()
        if not value:
            present = ", ".join(known for known in TELLING if self.env.get(known))
            self.refuse(name, f"is not set, although {present or 'its launcher'} is")
        return value

    def number(self, name: str, least: int = 0, most: int | None = None) -> int:
        """A whole number in a range, which must be there."""
        text = self.env.get(name, "").strip()
        if not text:
            self.text(name)
        elif not text.isascii() or not text.isdecimal():
            self.refuse(name, f"'{text}' is not a number")
        elif int(text) < least or (most is not None and int(text) > most):
            self.refuse(name, f"{text} is not in {least}..{'' if most is None else most}")
        else:
            return int(text)
        return least

    def parsed(self, name: str, parse: Callable[[str], list[T]]) -> list[T]:
        """What a parser makes of a variable; nothing where that is missing or raises ValueError."""
        text = self.text(name)
        try:
            return parse(text) if text else []
        except ValueError as error:
            self.refuse(name, str(error))
            return []

    def port(self, name: str) -> int:
        """A TCP port, which must be there."""
        return self.number(name, least=1, most=65535)

    def refuse(self, name: str, message: str, fix: str = FIX) -> None:
        """Notes what is wrong with a variable."""
        self.problems.append(Problem("launch.environment", name, message, fix))
