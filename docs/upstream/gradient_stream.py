"""ZeRO-2 with `overlap_comm` frees a gradient that its reduction still reads.

CPUs have no streams, so a stand-in notes which stream each tensor is recorded for, as CUDA's allocator would.
"""

import os
from contextlib import nullcontext

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29618", "WORLD_SIZE": "2"}

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 100, "contiguous_gradients": True},
}


class Stream:
    def wait_stream(self, other: "Stream") -> None: ...

    def synchronize(self) -> None: ...


def main(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    deepspeed.ops.__compatible_ops__ = {}  # else an operator for CPUs is compiled, which takes a minute
    deepspeed.init_distributed("gloo")
    compute, reduction, recorded, reduced, held = Stream(), Stream(), set(), set(), []
    accelerator = get_accelerator()
    accelerator.current_stream = lambda *_: compute
    accelerator.stream = lambda _: nullcontext()
    accelerator.resolves_data_dependency = lambda: False
    torch.Tensor.record_stream = lambda tensor, stream: recorded.add((tensor.untyped_storage().data_ptr(), stream))
    average = DeepSpeedZeroOptimizer.average_tensor

    def watched(self: DeepSpeedZeroOptimizer, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        reduced.add(tensor.untyped_storage().data_ptr())
        held.append(tensor)  # so that no other tensor gets its address
        buffers = {one.untyped_storage().data_ptr() for bucket in self.ipg_buckets.values() for one in bucket.buffer}
        average(self, tensor, dtype)
        reduced.difference_update(buffers)  # which live until the end of the pass

    DeepSpeedZeroOptimizer.average_tensor = watched
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))  # each is larger than a bucket
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    engine.optimizer.reduction_stream = reduction
    engine.backward(engine(torch.ones(1, 16, dtype=torch.bfloat16)).sum())
    freed = sum(one.grad is None for one in model.parameters())
    kept = sum((address, reduction) in recorded for address in reduced)
    torch.distributed.barrier()  # or the other rank loses its connections to a rank that has ended
    if rank == 0:
        print(f"{len(reduced)} gradients reduced in place, {freed} freed, {kept} recorded for the reduction's stream")
    if kept == len(reduced):
        raise SystemExit("all are recorded: the fault is mended")


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, nprocs=2, start_method="fork")
