"""With `torch_autocast` in fp16, checkpoints do not contain the loss scale."""

import os
import tempfile

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29616"}
os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 0},
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
    engine, resumed = made(), made()
    for factor in (1e30, 1e30, 1.0):
        take_step(engine, factor)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        resumed.load_checkpoint(folder)
    saved, loaded = (one.torch_autocast_z0_gradscaler.get_scale() for one in (engine, resumed))
    print(f"loss scale {saved} when the checkpoint was saved, {loaded} after it was loaded")
    if saved == loaded:
        raise SystemExit("the scale is the same: the fault is mended")


if __name__ == "__main__":
    main()
