"""Collectives that keep the ranks together while saving and loading: every rank learns of every problem."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from llmtrain.errors import CheckpointError, Problem, RecipeError
from llmtrain.plan import Plan
from llmtrain.plan.facts.own_code import changed_files

T = TypeVar("T")

Group = dist.ProcessGroup | None
"""The process group to communicate over; None for the one that training uses."""


def new_thread_group() -> Group:
    """Creates a gloo group of all ranks for use in a separate thread; called by all ranks.

    Training's own group has collectives in flight in its own order, and its devices are busy.
    """
    return dist.new_group(backend="gloo") if world_size() > 1 else None


def gather(value: T, group: Group = None) -> list[T]:
    """Returns the values of all ranks, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: T, source: int = 0, group: Group = None) -> T:
    """Returns the value of one rank, on every rank."""
    if world_size() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, src=source, group=group)
    return shared[0]


def all_reduce_max(values: Tensor, device: torch.device) -> Tensor:
    """Returns the largest of the values of all ranks at each place, on every rank and on the CPU.

    device: the one over which the ranks communicate.
    """
    if world_size() == 1:
        return values
    shared = values.to(device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.cpu()


def all_reduce_sum(values: Tensor) -> Tensor:
    """Returns the sums of the values of all ranks, on every rank."""
    if world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def world_size() -> int:
    """Returns the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def attempt(action: Callable[[], object], what: str) -> list[Problem]:
    """Runs an action on the file system. An OSError becomes a problem, which says that it cannot `what`."""
    try:
        action()
    except OSError as error:
        return [write_problem(error, what)]
    return []


def write_problem(error: OSError, what: str) -> Problem:
    """Converts an OSError to a problem."""
    where = str(error.filename) if error.filename else "the checkpoint"
    return Problem("checkpoint.write", where, f"cannot {what}: {error.strerror or error}")


def gather_problems(problems: list[Problem], group: Group = None) -> list[Problem]:
    """Returns the problems of all ranks, without duplicates."""
    return list(dict.fromkeys(problem for of_rank in gather(problems, group) for problem in of_rank))


def check_same_code(plan: Plan) -> None:
    """Raises RecipeError on all ranks if any of them has other files of the recipe's own code than rank 0.

    Called by all ranks. Each of them imports these files on its own machine.
    """
    code = broadcast(plan.code)
    if code is None:
        return
    changed = changed_files(code, plan.recipe.code_dir)
    problems = [
        Problem("code.differs", str(Path(plan.recipe.code_dir or "", name)), f"on {host} differs from that of rank 0")
        for host, names in gather((socket.gethostname(), changed))
        for name in names
    ]
    if problems:
        raise RecipeError(dict.fromkeys(problems))


def raise_together(problems: list[Problem], group: Group = None) -> None:
    """Raises CheckpointError on every rank if any of them has a problem."""
    if problems := gather_problems(problems, group):
        raise CheckpointError(problems)
