"""Determines the rank of this process from the environment variables of its launcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from itertools import chain
from typing import Any

from llmtrain.errors import Problem, RecipeError, format_value, reason
from llmtrain.launch.discovery import slurm_step, tf_config
from llmtrain.launch.discovery.mpi import MPIS
from llmtrain.launch.discovery.mpi import read as read_mpi
from llmtrain.launch.discovery.rank import Launcher, Rank, RankReader
from llmtrain.recipe.own_code import import_object, import_path

LAUNCHER_VARIABLE = "LLMTRAIN_LAUNCHER"
ENVIRONMENT = "environment"
"""Variables that were set by a user or a template, not by a launcher."""
TORCHRUN = "torchrun"
HOROVODRUN = "horovodrun"
"""Name of a launcher that gives the rendezvous of Horovod's ranks, but not that of torch's ranks."""


# The first launcher with a marker in the environment describes the worker. The innermost comes first, since a launcher
# inherits the variables of the one that started it.
LAUNCHERS = (
    Launcher("local", markers=(LAUNCHER_VARIABLE,)),
    # `accelerate launch` on several GPUs calls torchrun in its own process.
    Launcher(TORCHRUN, markers=("TORCHELASTIC_RUN_ID",)),
    # deepspeed/launcher/launch.py
    Launcher("deepspeed", markers=("CROSS_RANK", "CROSS_SIZE"), local_world_size="LOCAL_SIZE"),
    Launcher(
        HOROVODRUN,
        markers=("HOROVOD_RANK",),
        rank="HOROVOD_RANK",
        local_rank="HOROVOD_LOCAL_RANK",
        world_size="HOROVOD_SIZE",
        local_world_size="HOROVOD_LOCAL_SIZE",
        # The rendezvous of Horovod's ranks, at which torch's ranks agree on their own address.
        master_addr="HOROVOD_GLOO_RENDEZVOUS_ADDR",
        master_port="HOROVOD_GLOO_RENDEZVOUS_PORT",
    ),
)
# Set by hand or by a job template, with the names that `torch.distributed` reads.
BY_HAND = Launcher(ENVIRONMENT, markers=("RANK", "WORLD_SIZE", "LOCAL_RANK"))
ENTRY_POINTS = "llmtrain.launchers"
"""Group of the entry points by which installed packages describe further launchers."""


def installed_launchers() -> Iterator[Launcher]:
    """Yields the launchers that installed packages describe. Raises RecipeError for an entry point that names none."""
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            launcher = entry.load()
            fault = _fault(launcher)
        except Exception as error:
            fault = f"cannot be imported: {type(error).__name__}: {reason(error)}"
        if fault:
            field = f"entry point {entry.name} of {entry.dist.name if entry.dist else 'a package'}"
            fix = "repair or uninstall the package"
            raise RecipeError(Problem("launch.entry_point", field, f"{entry.value} {fault}", fix))
        yield launcher


def _fault(launcher: Any) -> str:
    """Returns why an object cannot describe a launcher; empty if it can."""
    taken = {known.name for known in (*LAUNCHERS, BY_HAND)}
    if isinstance(launcher, Launcher) and launcher.name not in taken:
        return ""
    return f"is {format_value(launcher)}, but must be a llmtrain.launch.Launcher of another name"


def named_launcher(path: str, folder: str) -> Launcher:
    """Returns the launcher that `--launched-by` names by its import path.

    folder: of the user's own modules. Raises RecipeError unless the path leads to a launcher that has started this
    process.
    """
    field = "--launched-by"
    try:
        import_path(path)
    except ValueError as error:
        raise RecipeError(Problem("launch.path", field, f"{format_value(path)} {error}")) from None
    launcher: Launcher = import_object(path, folder, field)
    if fault := _fault(launcher):
        raise RecipeError(Problem("launch.path", field, f"{path} {fault}"))
    if not any(os.environ.get(marker) for marker in launcher.markers):
        message = f"{path} has not started this process: no variable {' or '.join(launcher.markers)} is set"
        raise RecipeError(Problem("launch.markers", field, message, "leave it out to start workers here"))
    return launcher


def discover(
    env: Mapping[str, str] | None = None, argv: Sequence[str] = (), named: Launcher | None = None
) -> Rank | None:
    """Returns the rank of this process, or None if no launcher started it.

    A plain `python recipes/NAME.py` has no launcher. Neither has `accelerate launch` on a CPU: it starts one process,
    however many were requested (`launch.jobs.accelerate.requested_processes`).

    argv: the arguments of the script; `deepspeed` adds `--local_rank=N`. named: a launcher that the command line names,
    which may have started a known one, too. Raises RecipeError with every variable that is missing, not a number, out
    of range or inconsistent with another.
    """
    env = os.environ if env is None else env
    reader = RankReader(env)
    # Further launchers are looked for after the known ones, which they may start, but may set RANK themselves.
    launchers = chain(LAUNCHERS, [named] if named else [], installed_launchers(), [BY_HAND])
    launcher = next((launcher for launcher in launchers if any(env.get(marker) for marker in launcher.markers)), None)
    outer = next((candidate for candidate in _outer(env) if _counts_us(candidate[0], launcher, env)), None)
    if outer is not None:
        launcher, rank = outer[0], outer[1](reader)
        _check_agreement(launcher, rank, reader)
    elif launcher is not None:
        rank = _read(launcher, reader)
    else:
        rank = None
        _check_alone(reader)
    if rank is not None and launcher is not None and not reader.problems:
        _check_numbers(launcher, rank, reader, argv)
    if reader.problems:
        raise RecipeError(reader.problems)
    return rank


def _outer(env: Mapping[str, str]) -> Iterator[tuple[Launcher, Callable[[RankReader], Rank]]]:
    """Yields outer launchers whose processes may be workers, or may each start workers; the innermost comes first."""
    for mpi in MPIS:
        if env.get(mpi.world_size, "").isdecimal() and env.get(mpi.markers[0]) and int(env[mpi.world_size]) > 1:
            yield mpi, partial(read_mpi, mpi)
    if slurm_step.is_worker(env):
        yield slurm_step.LAUNCHER, slurm_step.read
    if tf_config.number_of_tasks(env.get(tf_config.VARIABLE, "")) not in (0, 1):
        yield tf_config.LAUNCHER, tf_config.read


def _check_alone(reader: RankReader) -> None:
    """Checks that no variables describe this process as one of several workers, which would each train alone."""
    for mpi in MPIS:
        if any(reader.env.get(name) for name in (mpi.rank, mpi.local_rank, mpi.world_size, mpi.local_world_size)):
            size, rank = reader.number(mpi.world_size, minimum=1), reader.env.get(mpi.rank) and reader.number(mpi.rank)
            if size > 1:
                reader.text(mpi.markers[0])
            elif rank and reader.env.get(mpi.world_size):
                reader.refuse(mpi.rank, f"{rank} is not below {mpi.world_size}={size}")
    if reader.env.get(slurm_step.MARKER):
        reader.number(slurm_step.MARKER, minimum=1)
    if tf_config.number_of_tasks(reader.env.get(tf_config.VARIABLE, "")) != 0:
        tf_config.read(reader)


def _counts_us(outer: Launcher, launcher: Launcher | None, env: Mapping[str, str]) -> bool:
    """Whether the processes of `outer` are the workers: nothing else has numbered them, except a template for it.

    If each of its processes has started workers of its own, WORLD_SIZE is larger than its number of processes.
    """
    if launcher is None:
        return True
    if launcher.name != ENVIRONMENT or outer.name == tf_config.LAUNCHER.name:
        return False
    world, processes = env.get("WORLD_SIZE", ""), env.get(outer.world_size, "")
    return not (world.isdecimal() and processes.isdecimal() and int(world) > int(processes))


def _read(launcher: Launcher, reader: RankReader) -> Rank:
    return Rank(
        rank=reader.number(launcher.rank),
        local_rank=reader.number(launcher.local_rank),
        world_size=reader.number(launcher.world_size, minimum=1),
        local_world_size=reader.number(launcher.local_world_size, minimum=1),
        master_addr=reader.text(launcher.master_addr),
        master_port=reader.port(launcher.master_port),
        launcher=launcher.name,
    )


def _check_agreement(launcher: Launcher, rank: Rank, reader: RankReader) -> None:
    """Checks that torch's variables, if set, agree with the launcher's."""
    text = (
        ("RANK", rank.rank, launcher.rank),
        ("LOCAL_RANK", rank.local_rank, launcher.local_rank),
        ("WORLD_SIZE", rank.world_size, launcher.world_size),
    )
    for name, value, origin in text:
        if reader.env.get(name, str(value)) != str(value):
            reader.refuse(name, f"{reader.env[name]} disagrees with {origin}={value}")


def _check_numbers(launcher: Launcher, rank: Rank, reader: RankReader, argv: Sequence[str]) -> None:
    """Checks that a worker's numbers are consistent."""
    world, local = f"{launcher.world_size}={rank.world_size}", f"{launcher.local_world_size}={rank.local_world_size}"
    if rank.rank >= rank.world_size:
        reader.refuse(launcher.rank, f"{rank.rank} is not below {world}")
    if rank.local_world_size > rank.world_size:
        reader.refuse(launcher.local_world_size, f"{rank.local_world_size} is more than {world}")
    if rank.local_rank >= rank.local_world_size:
        reader.refuse(launcher.local_rank, f"{rank.local_rank} is not below {local}")
    if rank.local_rank > rank.rank:
        reader.refuse(launcher.local_rank, f"{rank.local_rank} is above {launcher.rank}={rank.rank}")
    given = [argument.partition("=")[2] for argument in argv if argument.startswith("--local_rank=")]
    if given and given[-1] != str(rank.local_rank):
        reader.refuse(launcher.local_rank, f"{rank.local_rank} disagrees with the argument --local_rank={given[-1]}")


def without_local_rank(argv: Sequence[str]) -> list[str]:
    """Returns the arguments without the `--local_rank=N` that the `deepspeed` launcher adds."""
    return [arg for arg in argv if not arg.startswith("--local_rank=")]
