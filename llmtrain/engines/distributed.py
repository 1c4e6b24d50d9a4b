"""The process group of a run, and the few collectives that are not an engine's."""

from __future__ import annotations

import datetime
import os

import torch
from torch import distributed as dist

from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.discovery import HOROVODRUN, Rank


def init_process_group(rank: Rank, on_cpu: bool) -> torch.device:
    """Joins the process group that the launcher describes; returns this rank's device.

    Raises RecipeError where the group that comes about is not the one described: a worker that
    thinks it is alone would train a model of its own.
    """
    os.environ["DS_ACCELERATOR"] = "cpu" if on_cpu else "cuda"
    master_addr, master_port = rank.master_addr, rank.master_port
    if rank.launcher == HOROVODRUN:
        from llmtrain.engines.horovod_ranks import meeting_place

        master_addr, master_port = meeting_place()
    # DeepSpeed and accelerate read these; a launcher may have set some of them only.
    os.environ.update(
        RANK=str(rank.rank),
        LOCAL_RANK=str(rank.local_rank),
        WORLD_SIZE=str(rank.world_size),
        MASTER_ADDR=master_addr,
        MASTER_PORT=str(master_port),
    )
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    device = torch.device("cpu") if on_cpu else torch.device("cuda", rank.local_rank)
    if on_cpu:
        # Compiling DeepSpeed's shared-memory collective takes a minute at the first start; gloo needs none.
        __compatible_ops__["deepspeed_shm_comm"] = False
    else:
        torch.cuda.set_device(device)
    deepspeed.init_distributed(
        dist_backend="gloo" if on_cpu else "nccl", verbose=False, timeout=datetime.timedelta(minutes=30)
    )
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


def barrier() -> None:
    """Waits for every rank."""
    if dist.get_world_size() > 1:
        dist.barrier()
