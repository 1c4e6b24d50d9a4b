"""Which worker this process is, read from what its launcher left in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llmtrain.errors import Problem, RecipeError
from llmtrain.launch import slurm_step

T = TypeVar("T")

LAUNCHER_VARIABLE = "LLMTRAIN_LAUNCHER"
ENVIRONMENT = "environment"
"""Variables that no launcher set, but a user or a template."""
SLURM = "slurm"
"""Tasks of one step of `srun`, one for each device."""
HOROVODRUN = "horovodrun"
"""Name of a launcher that tells where Horovod's ranks meet, and not where torch's do."""


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
    def is_main(self) -> bool:
        """Whether this worker speaks to the user and writes what is written once."""
        return self.rank == 0


@dataclass(frozen=True)
class Launcher:
    """How one launcher describes a worker."""

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


# In order: the first launcher with a marker in the environment describes the worker. The innermost
# comes first, since a launcher that was itself started by another one inherits its variables.
LAUNCHERS = (
    Launcher("local", markers=(LAUNCHER_VARIABLE,)),
    # `accelerate launch` on several GPUs calls torchrun in its own process.
    Launcher("torchrun", markers=("TORCHELASTIC_RUN_ID",)),
    # deepspeed/launcher/launch.py
    Launcher("deepspeed", markers=("CROSS_RANK", "CROSS_SIZE"), local_world_size="LOCAL_SIZE"),
    Launcher(
        HOROVODRUN,
        markers=("HOROVOD_RANK",),
        rank="HOROVOD_RANK",
        local_rank="HOROVOD_LOCAL_RANK",
        world_size="HOROVOD_SIZE",
        local_world_size="HOROVOD_LOCAL_SIZE",
        # Where Horovod's ranks meet; torch's agree there on a place of their own.
        master_addr="HOROVOD_GLOO_RENDEZVOUS_ADDR",
        master_port="HOROVOD_GLOO_RENDEZVOUS_PORT",
    ),
    # Set by hand or by a job template, in the names that `torch.distributed` reads.
    Launcher(ENVIRONMENT, markers=("RANK", "WORLD_SIZE", "LOCAL_RANK")),
)


def discover(env: Mapping[str, str] | None = None, argv: Sequence[str] = ()) -> Rank | None:
    """This process among the workers of a launcher; None where no launcher started it.

    A plain `python recipes/NAME.py` has none. Neither has `accelerate launch` on a CPU: it starts
    one process, however many were asked for (`accelerate_processes`).

    argv: the arguments of the script; `deepspeed` puts `--local_rank=N` there.
    Raises RecipeError naming every variable that is missing, not a number, out of range or in
    disagreement with another.
    """
    env = os.environ if env is None else env
    launcher = next((one for one in LAUNCHERS if any(env.get(marker) for marker in one.markers)), None)
    reader = _Reader(env)
    if slurm_step.is_worker(env) and (launcher is None or (launcher.name == ENVIRONMENT and not _own_ranks(env))):
        return _in_slurm(reader)
    if launcher is None:
        return None
    rank = Rank(
        rank=reader.number(launcher.rank),
        local_rank=reader.number(launcher.local_rank),
        world_size=reader.number(launcher.world_size, least=1),
        local_world_size=reader.number(launcher.local_world_size, least=1),
        master_addr=reader.text(launcher.master_addr),
        master_port=reader.number(launcher.master_port, least=1, most=65535),
        launcher=launcher.name,
    )
    problems = reader.problems or _contradictions(rank, launcher, env, argv)
    if problems:
        raise RecipeError(problems)
    return rank


def _own_ranks(env: Mapping[str, str]) -> bool:
    """Whether RANK counts something larger than tasks of Slurm: each of them started workers of its own."""
    world = env.get("WORLD_SIZE", "")
    return world.isdecimal() and int(world) > int(env[slurm_step.MARKER])


def _in_slurm(reader: _Reader) -> Rank:
    """A task of a Slurm step. Raises RecipeError for what is missing, and for a RANK that says otherwise."""
    names, env = slurm_step.NAMES, reader.env
    node = reader.number("SLURM_NODEID")
    counts = reader.parsed(names["LOCAL_WORLD_SIZE"], slurm_step.tasks_per_node) or [1]
    nodes = reader.parsed(names["MASTER_ADDR"], slurm_step.hosts) or [""]
    if node >= len(counts) and not reader.problems:
        reader.refuse("SLURM_NODEID", f"{node} is not among the {len(counts)} nodes of {names['LOCAL_WORLD_SIZE']}")
    rank = Rank(
        rank=reader.number(names["RANK"]),
        local_rank=reader.number(names["LOCAL_RANK"]),
        world_size=reader.number(names["WORLD_SIZE"], least=1),
        local_world_size=counts[min(node, len(counts) - 1)],
        # slurm/train.sbatch sets both: the address that Slurm knows the node by, and a port nobody listens on.
        master_addr=env.get("MASTER_ADDR") or nodes[0],
        master_port=(
            reader.number("MASTER_PORT", least=1, most=65535) if env.get("MASTER_PORT") else slurm_step.port_of(env)
        ),
        launcher=SLURM,
        nodes=len(counts),
    )
    for name, told in (("RANK", rank.rank), ("LOCAL_RANK", rank.local_rank), ("WORLD_SIZE", rank.world_size)):
        if env.get(name, str(told)) != str(told):
            reader.refuse(name, f"{env[name]} disagrees with {names[name]}={told}")
    problems = reader.problems or _contradictions(rank, Launcher(SLURM, (), **_launcher_names(names)), env, ())
    if problems:
        raise RecipeError(problems)
    return rank


def _launcher_names(names: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): variable for name, variable in names.items()}


class _Reader:
    """Reads variables and collects what is wrong with them."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.problems: list[Problem] = []

    def text(self, name: str) -> str:
        value = self.env.get(name, "").strip()
        if not value:
            known_names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", slurm_step.MARKER)
            present = ", ".join(known for known in known_names if self.env.get(known))
            self.refuse(name, f"is not set, although {present or 'its launcher'} is")
        return value

    def number(self, name: str, least: int = 0, most: int | None = None) -> int:
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

    def refuse(self, name: str, message: str) -> None:
        self.problems.append(Problem("launch.environment", name, message, _FIX))


_FIX = "start it with a launcher that sets all of them, or unset RANK, WORLD_SIZE and LOCAL_RANK to start workers here"


def _contradictions(rank: Rank, launcher: Launcher, env: Mapping[str, str], argv: Sequence[str]) -> list[Problem]:
    """What cannot be true at once."""
    world, local = f"{launcher.world_size}={rank.world_size}", f"{launcher.local_world_size}={rank.local_world_size}"
    found = []
    if rank.rank >= rank.world_size:
        found.append((launcher.rank, f"{rank.rank} is not below {world}"))
    if rank.local_world_size > rank.world_size:
        found.append((launcher.local_world_size, f"{rank.local_world_size} is more than {world}"))
    if rank.local_rank >= rank.local_world_size:
        found.append((launcher.local_rank, f"{rank.local_rank} is not below {local}"))
    if rank.local_rank > rank.rank:
        found.append((launcher.local_rank, f"{rank.local_rank} is above {launcher.rank}={rank.rank}"))
    argument = _local_rank_argument(argv)
    if argument is not None and argument != str(rank.local_rank):
        found.append((launcher.local_rank, f"{rank.local_rank} disagrees with the argument --local_rank={argument}"))
    return [Problem("launch.environment", name, message, _FIX) for name, message in found]


def _local_rank_argument(argv: Sequence[str]) -> str | None:
    values = [arg.partition("=")[2] for arg in argv if arg.startswith("--local_rank=")]
    return values[-1] if values else None


def without_local_rank(argv: Sequence[str]) -> list[str]:
    """The arguments without the `--local_rank=N` that the `deepspeed` launcher adds."""
    return [arg for arg in argv if not arg.startswith("--local_rank=")]


def accelerate_processes(env: Mapping[str, str] | None = None, parent: Sequence[str] | None = None) -> int | None:
    """How many processes `accelerate launch` was asked for where it started only this one, else None.

    On a CPU its simple launcher starts one process and passes the number on to nobody
    (accelerate/commands/launch.py), so it is read from the parent's command line.

    parent: the parent's command line; read from /proc where it is not given.
    """
    env = os.environ if env is None else env
    if "ACCELERATE_MIXED_PRECISION" not in env or env.get("RANK"):
        return None
    parent = _parent_command() if parent is None else parent
    for index, argument in enumerate(parent):
        name, _, value = argument.partition("=")
        if name.replace("-", "_") == "__num_processes":
            value = value or "".join(parent[index + 1 : index + 2])
            return int(value) if value.isdecimal() and int(value) > 0 else None
    return None


def _parent_command() -> list[str]:
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(part) for part in raw.split(b"\0") if part]
