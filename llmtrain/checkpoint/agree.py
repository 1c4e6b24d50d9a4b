"""How the ranks stay together while they save and load: what one of them meets, all of them learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import distributed as dist

from llmtrain.errors import CheckpointError, Problem

T = TypeVar("T")

Group = dist.ProcessGroup | None
"""What all ranks talk over; None for the one that they train over."""


def group_of_threads() -> Group:
    """A group of all ranks for a thread of its own, over the network of the hosts; made by all ranks.

    The group that is trained over has an order of its own, and its devices have other things to do.
    """
    return dist.new_group(backend="gloo") if world_size() > 1 else None


def gather(value: T, group: Group = None) -> list[T]:
    """The value of each rank, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: T, source: int = 0, group: Group = None) -> T:
    """The value of one rank, on every rank."""
    if world_size() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, src=source, group=group)
    return shared[0]


def world_size() -> int:
    """All ranks; 1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def attempt(action: Callable[[], object], what: str) -> list[Problem]:
    """Does something to the filesystem; an OSError becomes a problem with `what` could not be done."""
    try:
        action()
    except OSError as error:
        return [failed(error, what)]
    return []


def failed(error: OSError, what: str) -> Problem:
    """An OSError as a problem."""
    where = str(error.filename) if error.filename else "the checkpoint"
    return Problem("checkpoint.write", where, f"cannot {what}: {error.strerror or error}")


def united(problems: list[Problem], group: Group = None) -> list[Problem]:
    """The problems of all ranks, each one once."""
    return list(dict.fromkeys(problem for found in gather(problems, group) for problem in found))


def raise_together(problems: list[Problem], group: Group = None) -> None:
    """Raises CheckpointError on every rank where any of them has a problem."""
    if found := united(problems, group):
        raise CheckpointError(found)
