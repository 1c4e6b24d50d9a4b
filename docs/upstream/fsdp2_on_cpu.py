"""accelerate ignores an FSDP plugin on CPUs: the model is wrapped by DistributedDataParallel, without a warning."""

import os

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29614", "WORLD_SIZE": "2"}

import accelerate
import torch
from torch import nn


def main(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.distributed.barrier()  # or the other rank loses its connections to a rank that has ended
    if rank == 0:
        print(f"distributed_type {accelerator.distributed_type}, prepared model {type(model).__name__}")
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        raise SystemExit("the model is sharded: the fault is mended")


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, nprocs=2, start_method="fork")
