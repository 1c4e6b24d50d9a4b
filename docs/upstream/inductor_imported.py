"""ZeRO imports torch's compiler when it first asks whether the optimizer is DeepSpeed's Muon."""

import os
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29620"}
os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}

import deepspeed
import torch
from torch import nn

COMPILER = "torch._inductor.compile_fx"


def main() -> None:
    deepspeed.ops.__compatible_ops__ = {}  # else an operator for CPUs is compiled, which takes a minute
    deepspeed.init_distributed("gloo")
    model = nn.Linear(8, 1)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config["zero_allow_untested_optimizer"] = True
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    before = COMPILER in sys.modules
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    print(f"{COMPILER} is imported: {before} after deepspeed.initialize, {COMPILER in sys.modules} after a step")
    if COMPILER not in sys.modules:
        raise SystemExit("it is not imported: the fault is mended")


if __name__ == "__main__":
    main()
