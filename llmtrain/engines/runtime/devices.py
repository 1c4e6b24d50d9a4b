"""Chooses the GPU of each rank, and checks that no two ranks use the same one."""

from __future__ import annotations

import gc
import json
import socket
from typing import TYPE_CHECKING

import torch

from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.discovery.rank import Rank
from llmtrain.launch.discovery.slurm_step import LAUNCHER as SLURM

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

RULE = "launch.devices"
FIELD = "CUDA_VISIBLE_DEVICES"
_FIX = "let the launcher show each worker all GPUs of its machine, or exactly one of its own"


def device_index(rank: Rank, visible: int) -> int:
    """Returns the index of a rank's GPU among the `visible` GPUs of its process.

    A launcher shows a worker either all GPUs of its machine, or only its own (`srun --gpus-per-task=1`). CUDA handles
    which GPUs these are, by number or UUID. Raises RecipeError for any other number of GPUs.
    """
    who = f"rank {rank.rank}, worker {rank.local_rank} of {rank.local_world_size} on its machine, sees {visible} GPUs"
    if rank.launcher == SLURM.name and visible > rank.local_world_size:
        fix = f"--ntasks-per-node={visible}, one task for each GPU"
        raise RecipeError(Problem(RULE, "SLURM_NTASKS_PER_NODE", f"{who}: the rest would be idle", fix))
    if visible == 1:
        return 0
    if rank.local_rank >= visible:
        raise RecipeError(Problem(RULE, FIELD, who, _FIX))
    return rank.local_rank


def free_device_memory() -> None:
    """Returns the memory of objects that nothing refers to to the device, for other models."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def gpu_identity(index: int) -> str:
    """Returns a name that distinguishes a GPU from every other, however processes number it."""
    return f"{socket.gethostname()} GPU-{torch.cuda.get_device_properties(index).uuid}"


def check_distinct(rank: int, world_size: int, identity: str, store: Store) -> None:
    """Raises RecipeError on all ranks if several ranks would use one GPU. All ranks must call it.

    NCCL would report this too, but only after minutes, or it would hang.
    """
    store.set(f"rank_{rank}", identity)
    if rank == 0:
        owners: dict[str, list[int]] = {}
        for other in range(world_size):
            owners.setdefault(store.get(f"rank_{other}").decode(), []).append(other)
        store.set("shared", json.dumps({name: ranks for name, ranks in owners.items() if len(ranks) > 1}))
    shared: dict[str, list[int]] = json.loads(store.get("shared"))
    if shared:
        store.set(f"told_{rank}", "")
        if rank == 0:  # the store ends with it, and the others have to read the answer before
            for other in range(world_size):
                store.get(f"told_{other}")
        raise RecipeError(
            Problem(RULE, FIELD, f"ranks {', '.join(map(str, ranks))} would share {name}", _FIX)
            for name, ranks in shared.items()
        )
