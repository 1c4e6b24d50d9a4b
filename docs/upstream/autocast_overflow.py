"""ZeRO with `torch_autocast` in fp16: an overflow does not lower the loss scale."""

import os

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "torch_autocast": {"enabled": True, "dtype": "float16"},
}


def made() -> deepspeed.DeepSpeedEngine:
    model = nn.Linear(8, 1)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]


def take_step(engine: deepspeed.DeepSpeedEngine, factor: float) -> None:
    """Takes a step; with a large factor, its scaled gradients overflow."""
    engine.backward(factor * engine(torch.ones(1, 8)).sum())
    engine.step()


def main() -> None:
    deepspeed.ops.__compatible_ops__ = {}  # else an operator for CPUs is compiled, which takes a minute
    deepspeed.init_distributed("gloo")
    engine = made()
    before = engine.optimizer.torch_autocast_gradscaler.get_scale()
    for _ in range(4):
        take_step(engine, 1e30)
    after = engine.optimizer.torch_autocast_gradscaler.get_scale()
    print(f"{engine.skipped_steps} of 4 steps skipped; loss scale {before} before them, {after} after them")
    if after < before:
        raise SystemExit("the scale falls: the fault is mended")


if __name__ == "__main__":
    main()
