"""The process group of a run, and the few collectives that belong to no engine."""

from __future__ import annotations

import datetime
import errno
import os
import re
import socket
from contextlib import suppress
from dataclasses import replace

import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from llmtrain.engines.runtime.devices import check_distinct, device_index, gpu_identity
from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.authentication import SECRET_VARIABLE, Secret
from llmtrain.launch.discovery.discover import HOROVODRUN, TORCHRUN
from llmtrain.launch.discovery.interfaces import stay_on_loopback
from llmtrain.launch.discovery.rank import LOOPBACK, Rank
from llmtrain.overrides.torch import join_fake_group

TIMEOUT = datetime.timedelta(minutes=30)
"""Longest time that a rank waits for others if nothing else ends the wait."""

_rendezvous: Store | None = None
"""The store where the ranks of the process group met, which the launcher may have opened."""


def init_process_group(rank: Rank, on_cpu: bool) -> torch.device:
    """Joins the process group that the launcher describes; returns this rank's device.

    Raises RecipeError if the resulting group is not the one described, because a worker that considers itself alone
    would train a separate model. Also raises RecipeError if another program uses the rendezvous port.
    """
    os.environ["DS_ACCELERATOR"] = "cpu" if on_cpu else "cuda"
    if rank.launcher == HOROVODRUN:
        from llmtrain.engines.runtime.horovod_ranks import rendezvous_address

        address, port = rendezvous_address()
        rank = replace(rank, master_addr=address, master_port=port)
    index = rank.local_rank if on_cpu else device_index(rank, torch.cuda.device_count())
    # DeepSpeed and accelerate read these, and a launcher may have set only some of them. They take the local rank for
    # the device index, which differs if a worker sees only its own device.
    os.environ.update(
        RANK=str(rank.rank),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(rank.world_size),
        MASTER_ADDR=LOOPBACK if _has_own_store(rank) else rank.master_addr,
        MASTER_PORT=str(rank.master_port),
    )
    if rank.on_one_machine:
        stay_on_loopback()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", index)
    if on_cpu:
        from llmtrain.overrides.deepspeed import use_no_compiled_collective

        use_no_compiled_collective()
    else:
        torch.cuda.set_device(device)
    _join(rank, None if on_cpu else gpu_identity(index))
    if (dist.get_rank(), dist.get_world_size()) != (rank.rank, rank.world_size):
        raise RecipeError(
            Problem(
                "launch.alone",
                "WORLD_SIZE",
                f"the launcher started {rank.world_size} workers, but this process joined a group of "
                f"{dist.get_world_size()} as rank {dist.get_rank()}",
                "start the recipe with `llmtrain train`, torchrun or deepspeed",
            )
        )
    return device


def _join(rank: Rank, gpu: str | None) -> None:
    """Initializes torch's process group. gpu: the identity of this rank's GPU; None on a CPU.

    The group is bound to no device, as DeepSpeed would bind it. NCCL would then connect at once, before GPUs have been
    compared, and split later groups off the first one: their point-to-point messages would share its communicator, and
    a group of another backend would hang (pytorch/pytorch#145376).

    Raises RecipeError if several ranks would use one GPU, or if another program uses the rendezvous port.
    """
    import deepspeed

    global _rendezvous
    backend = "gloo" if gpu is None else "nccl"
    try:
        if not dist.is_initialized():
            own_store: Store = _loopback_store(rank) if _has_own_store(rank) else _launchers_store()
            if gpu is not None and rank.world_size > 1:
                check_distinct(rank.rank, rank.world_size, gpu, PrefixStore("llmtrain/devices", own_store))
            dist.init_process_group(
                backend, store=own_store, rank=rank.rank, world_size=rank.world_size, timeout=TIMEOUT
            )
            _rendezvous = own_store
        deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=TIMEOUT)
    except (OSError, dist.DistNetworkError) as error:
        if "EADDRINUSE" not in str(error) and getattr(error, "errno", None) != errno.EADDRINUSE:
            raise
        message = f"{rank.master_port} is in use on this machine, but the ranks need it as rendezvous"
        fix = "choose another: MASTER_PORT=N, or the launcher's --master-port N"
        raise RecipeError(Problem("launch.port", "MASTER_PORT", message, fix)) from None


def _has_own_store(rank: Rank) -> bool:
    """Returns whether rank 0 opens the rendezvous store for this machine alone. torchrun opens a store itself."""
    return rank.on_one_machine and rank.launcher != TORCHRUN


def _launchers_store() -> Store:
    """Returns the rendezvous store that the environment describes; rank 0 opens it unless torchrun has."""
    launchers: Store = next(iter(rendezvous("env://", timeout=TIMEOUT)))[0]
    launchers.set_timeout(TIMEOUT)
    return launchers


def _loopback_store(rank: Rank) -> TCPStore:
    """Returns the rendezvous store of a single machine. Raises OSError if another program uses the port."""
    listener = socket.create_server((LOOPBACK, rank.master_port)).detach() if rank.rank == 0 else None
    return TCPStore(
        LOOPBACK,
        rank.master_port,
        rank.world_size,
        is_master=rank.rank == 0,
        timeout=TIMEOUT,
        master_listen_fd=listener,
    )


def agreed_secret(secret: Secret, rank: Rank) -> Secret:
    """Returns the secret with which all ranks sign their messages: the launcher's or else rank 0's.

    All ranks must call it. Raises RecipeError if only some ranks have a secret from their launcher, or if they differ.
    """
    exchange, key = store("secret"), "secret"
    if rank.rank == 0:
        exchange.set(key, secret.authenticator.sign(key, "") if secret.is_given else secret.text)
        return secret
    value = exchange.get(key)
    if not secret.is_given and re.fullmatch(rb"[0-9a-f]{64}", value):
        return Secret(value.decode(), is_given=False)
    with suppress(ValueError):
        if secret.is_given:
            secret.authenticator.verify(key, value)
            return secret
    what = "is another one" if secret.is_given else "is not set"
    message = f"{what} for rank {rank.rank}, unlike rank 0"
    fix = "pass the same secret to all ranks, or to none"
    raise RecipeError(Problem("launch.secret", SECRET_VARIABLE, message, fix))


def store(prefix: str) -> Store:
    """Returns the ranks' rendezvous store with a key prefix for one purpose; its operations wait for no device."""
    assert _rendezvous is not None
    return PrefixStore(f"llmtrain/{prefix}", _rendezvous)


def rank() -> int:
    """Returns this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    """Waits for every rank."""
    if dist.get_world_size() > 1:
        dist.barrier()


def pretend(rank: int, world_size: int) -> None:
    """Makes this process a rank of a group without other members, and can be used for nothing else.

    For code that examines how a plan divides its state. Collectives of torch's `fake` backend return at once and leave
    their buffers as they were. An engine can therefore be built and filled with values, but it cannot be trained.
    """
    import deepspeed

    from llmtrain.overrides.deepspeed import use_no_compiled_collective

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # no process connects to it
    )
    join_fake_group(rank, world_size)
    use_no_compiled_collective()
    deepspeed.init_distributed(dist_backend="fake", verbose=False, dist_init_required=False)


def is_alone() -> bool:
    """Returns whether the group is the fake one that `pretend` makes."""
    return dist.is_initialized() and dist.get_backend() == "fake"
