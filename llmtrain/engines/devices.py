"""Which GPU a rank computes on, and that no other rank computes there."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import torch

from llmtrain.errors import Problem, RecipeError
from llmtrain.launch.rank import Rank
from llmtrain.launch.slurm_step import LAUNCHER as SLURM

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

RULE = "launch.devices"
FIELD = "CUDA_VISIBLE_DEVICES"
_FIX = "let the launcher show each worker all GPUs of its machine, or exactly one of its own"


def device_index(rank: Rank, visible: int) -> int:
    """The GPU of a rank, counted among the `visible` ones of its process.

    A launcher shows a worker all GPUs of its machine, or its own alone (`srun --gpus-per-task=1`); which
    they are, and whether by number or UUID, is CUDA's business. Raises RecipeError for anything else.
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


def gpu_identity(index: int) -> str:
    """What tells a GPU from every other, however processes number it."""
    return f"{socket.gethostname()} GPU-{torch.cuda.get_device_properties(index).uuid}"


def check_distinct(rank: int, world_size: int, identity: str, store: Store) -> None:
    """Raises RecipeError on all ranks where several would compute on one GPU; to be asked by all of them.

    NCCL finds that out as well, after minutes, or hangs.
    """
    store.set(f"rank_{rank}", identity)
    if rank == 0:
        owners: dict[str, list[int]] = {}
        for other in range(world_size):
            owners.setdefault(store.get(f"rank_{other}").decode(), []).append(other)
        store.set("shared", json.dumps({name: ranks for name, ranks in owners.items() if len(ranks) > 1}))
    shared: dict[str, list[int]] = json.loads(store.get("shared"))
    if shared:
        raise RecipeError(
            Problem(RULE, FIELD, f"ranks {', '.join(map(str, ranks))} would share {name}", _FIX)
            for name, ranks in shared.items()
        )
