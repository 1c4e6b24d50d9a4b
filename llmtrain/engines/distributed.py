"""The process group of a run, and the few collectives that are not an engine's."""

from __future__ import annotations

import datetime
import os

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from llmtrain.engines.devices import check_distinct, device_index, gpu_identity
from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.discovery import HOROVODRUN
from llmtrain.launch.rank import Rank


def init_process_group(rank: Rank, on_cpu: bool) -> torch.device:
    """Joins the process group that the launcher describes; returns this rank's device.

    Raises RecipeError where the group that comes about is not the one described: a worker that
    thinks it is alone would train a model of its own; and where another program has the port to meet at.
    """
    os.environ["DS_ACCELERATOR"] = "cpu" if on_cpu else "cuda"
    master_addr, master_port = rank.master_addr, rank.master_port
    if rank.launcher == HOROVODRUN:
        from llmtrain.engines.horovod_ranks import meeting_place

        master_addr, master_port = meeting_place()
    index = rank.local_rank if on_cpu else device_index(rank, torch.cuda.device_count())
    # DeepSpeed and accelerate read these; a launcher may have set some of them only. To them the local
    # rank is the number of the device, which it is not where a worker sees its own alone.
    os.environ.update(
        RANK=str(rank.rank),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(rank.world_size),
        MASTER_ADDR=master_addr,
        MASTER_PORT=str(master_port),
    )
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    device = torch.device("cpu") if on_cpu else torch.device("cuda", index)
    if on_cpu:
        # Compiling DeepSpeed's shared-memory collective takes a minute at the first start; gloo needs none.
        __compatible_ops__["deepspeed_shm_comm"] = False
    else:
        torch.cuda.set_device(device)
    try:
        deepspeed.init_distributed(
            dist_backend="gloo" if on_cpu else "nccl", verbose=False, timeout=datetime.timedelta(minutes=30)
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        message = f"{master_port} is in use on this machine, where the ranks were to meet"
        fix = "choose another: MASTER_PORT=N, or the launcher's --master-port N"
        raise RecipeError(Problem("launch.port", "MASTER_PORT", message, fix)) from None
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
