"""The rank of a worker, and the environment variables that describe it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

from llmtrain.errors import Problem
from llmtrain.launch.rendezvous import free_port

T = TypeVar("T")

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Rank:
    """The rank of a worker: its global and local rank, the world sizes, and the rendezvous."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str
    """Name of the `Launcher` that it was read from."""
    nodes: int | None = None
    """Number of machines; None if the launcher does not say."""

    @property
    def shape(self) -> tuple[int, int]:
        """Nodes and workers per node, the same for all ranks. If nodes differ, each worker counts as a node."""
        if self.nodes is None:
            return self.world_size // self.local_world_size, self.local_world_size
        if self.world_size % self.nodes:
            return self.world_size, 1
        return self.nodes, self.world_size // self.nodes

    @property
    def on_one_machine(self) -> bool:
        """Whether all workers are on this machine, so that no other machine needs to be reached."""
        return self.local_world_size >= self.world_size

    @classmethod
    def alone(cls) -> Self:
        """Returns the rank of a program that no launcher has started."""
        return cls(0, 0, 1, 1, LOOPBACK, free_port(), "python", nodes=1)

    @property
    def is_main(self) -> bool:
        """Whether this worker prints messages and writes the files that are written once."""
        return self.rank == 0


@dataclass(frozen=True)
class Launcher:
    """The variables with which a launcher, or whatever started it, describes a worker."""

    name: str
    markers: tuple[str, ...]
    """Variables that only this launcher sets; one of them is enough to recognise it."""
    rank: str = "RANK"
    """Names of its variables."""
    local_rank: str = "LOCAL_RANK"
    world_size: str = "WORLD_SIZE"
    local_world_size: str = "LOCAL_WORLD_SIZE"
    master_addr: str = "MASTER_ADDR"
    master_port: str = "MASTER_PORT"


RANK_MARKERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"),
)
"""Variables by which a process is recognised as a worker, for messages."""
FIX = "start it with a launcher that sets all of them, or unset those that are set to start workers here"


class RankReader:
    """Reads variables and collects the problems with them."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.problems: list[Problem] = []

    def text(self, name: str) -> str:
        """Returns a variable that must be set."""
        value = self.env.get(name, "").strip()
        if not value:
            present = ", ".join(known for known in RANK_MARKERS if self.env.get(known))
            self.refuse(name, f"is not set, although {present or 'its launcher'} is")
        return value

    def number(self, name: str, minimum: int = 0, maximum: int | None = None) -> int:
        """Returns an integer in a range, which must be set."""
        text = self.env.get(name, "").strip()
        if not text:
            self.text(name)
        elif not text.isascii() or not text.isdecimal():
            self.refuse(name, f"'{text}' is not a number")
        elif int(text) < minimum or (maximum is not None and int(text) > maximum):
            self.refuse(name, f"{text} is not in {minimum}..{'' if maximum is None else maximum}")
        else:
            return int(text)
        return minimum

    def parsed(self, name: str, parse: Callable[[str], list[T]]) -> list[T]:
        """Parses a variable. Returns an empty list if it is missing or the parser raises ValueError."""
        text = self.text(name)
        try:
            return parse(text) if text else []
        except ValueError as error:
            self.refuse(name, str(error))
            return []

    def port(self, name: str) -> int:
        """Returns a TCP port, which must be set."""
        return self.number(name, minimum=1, maximum=65535)

    def refuse(self, name: str, message: str, fix: str = FIX) -> None:
        """Adds a problem with a variable."""
        self.problems.append(Problem("launch.environment", name, message, fix))
