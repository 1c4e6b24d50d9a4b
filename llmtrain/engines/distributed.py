"""The process group of a run, and the few collectives that are not an engine's."""

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
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from llmtrain.engines.devices import check_distinct, device_index, gpu_identity
from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.discovery import HOROVODRUN, TORCHRUN
from llmtrain.launch.interfaces import stay_on_loopback
from llmtrain.launch.rank import LOOPBACK, Rank
from llmtrain.launch.seal import SECRET_VARIABLE, Secret

TIMEOUT = datetime.timedelta(minutes=30)
"""Of a rank that waits for others, where nothing else ends it."""


def init_process_group(rank: Rank, on_cpu: bool) -> torch.device:
    """Joins the process group that the launcher describes; returns this rank's device.

    Raises RecipeError where the group that comes about is not the one described: a worker that
    thinks it is alone would train a model of its own; and where another program has the port to meet at.
    """
    os.environ["DS_ACCELERATOR"] = "cpu" if on_cpu else "cuda"
    if rank.launcher == HOROVODRUN:
        from llmtrain.engines.horovod_ranks import meeting_place

        address, port = meeting_place()
        rank = replace(rank, master_addr=address, master_port=port)
    index = rank.local_rank if on_cpu else device_index(rank, torch.cuda.device_count())
    # DeepSpeed and accelerate read these; a launcher may have set some of them only. To them the local
    # rank is the number of the device, which it is not where a worker sees its own alone.
    os.environ.update(
        RANK=str(rank.rank),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(rank.world_size),
        MASTER_ADDR=LOOPBACK if _has_own_store(rank) else rank.master_addr,
        MASTER_PORT=str(rank.master_port),
    )
    if rank.on_one_machine:
        stay_on_loopback()
    from deepspeed.ops import __compatible_ops__

    device = torch.device("cpu") if on_cpu else torch.device("cuda", index)
    if on_cpu:
        # Compiling DeepSpeed's shared-memory collective takes a minute at the first start; gloo needs none.
        __compatible_ops__["deepspeed_shm_comm"] = False
    else:
        torch.cuda.set_device(device)
    _join(rank, "gloo" if on_cpu else "nccl")
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
    if not on_cpu and rank.world_size > 1:
        check_distinct(rank.rank, rank.world_size, gpu_identity(index), store("devices"))
    return device


def _join(rank: Rank, backend: str) -> None:
    """Raises RecipeError where another program has the port to meet at."""
    import deepspeed

    try:
        if _has_own_store(rank) and not dist.is_initialized():
            own, world_size = _loopback_store(rank), rank.world_size
            dist.init_process_group(backend, store=own, rank=rank.rank, world_size=world_size, timeout=TIMEOUT)
        deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=TIMEOUT)
    except (OSError, dist.DistNetworkError) as error:
        if "EADDRINUSE" not in str(error) and getattr(error, "errno", None) != errno.EADDRINUSE:
            raise
        message = f"{rank.master_port} is in use on this machine, where the ranks were to meet"
        fix = "choose another: MASTER_PORT=N, or the launcher's --master-port N"
        raise RecipeError(Problem("launch.port", "MASTER_PORT", message, fix)) from None


def _has_own_store(rank: Rank) -> bool:
    """Whether rank 0 opens the store that the ranks meet at, for this machine alone. torchrun opens one itself."""
    return rank.on_one_machine and rank.launcher != TORCHRUN


def _loopback_store(rank: Rank) -> TCPStore:
    """Raises OSError where another program has the port."""
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
    """What all ranks seal their words with: the launcher's secret, or else rank 0's. To be called by all of them.

    Raises RecipeError where some have one from their launcher and others have none, or another.
    """
    own, about = store("seal"), "secret"
    if rank.rank == 0:
        own.set(about, secret.seal.seal(about, "") if secret.is_given else secret.text)
        return secret
    said = own.get(about)
    if not secret.is_given and re.fullmatch(rb"[0-9a-f]{64}", said):
        return Secret(said.decode(), is_given=False)
    with suppress(ValueError):
        if secret.is_given:
            secret.seal.opened(about, said)
            return secret
    what = "is another one" if secret.is_given else "is not set"
    message = f"{what} for rank {rank.rank}, unlike rank 0"
    fix = "hand the same to all ranks, or none to any"
    raise RecipeError(Problem("launch.secret", SECRET_VARIABLE, message, fix))


def store(prefix: str) -> Store:
    """The key-value store that the ranks met at, for the keys of one purpose: nobody waits for a device there."""
    return PrefixStore(f"llmtrain/{prefix}", _get_default_store())


def rank() -> int:
    """This rank; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    """Waits for every rank."""
    if dist.get_world_size() > 1:
        dist.barrier()
