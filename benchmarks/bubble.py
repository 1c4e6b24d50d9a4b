"""Measures the bubble of DeepSpeed's pipeline engine against (p − 1) / (m + p − 1), and writes results/bubble.json.

python benchmarks/bubble.py

Stages sleep instead of computing. The measurement therefore covers only the schedule, and two cores are enough for four
stages. The engine is DeepSpeed's own, with its `TrainSchedule` over gloo.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.predict.time import bubble_of

CASES = ((2, 2), (2, 8), (4, 4), (4, 8), (4, 16))
"""Numbers of stages and micro-batches."""
FORWARD_S, BACKWARD_S = 0.1, 0.2
STEPS = 3
WORLD = 4
RESULT = Path(__file__).parent / "results" / "bubble.json"


class _Sleep(torch.autograd.Function):
    """The identity, which sleeps in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(BACKWARD_S)
        return gradients[0]


class SleepingStage(nn.Module):
    """A sleeping stage with one weight, so that there is something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: [batch, 4]."""
        slept: Tensor = _Sleep.apply(inputs * self.scale)
        return slept


def measure(stages: int, micro_batches: int) -> float:
    """Returns the median duration of a step in seconds, without the first step."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    module = PipelineModule(
        layers=[SleepingStage() for _ in range(stages)],
        num_stages=stages,
        loss_fn=lambda outputs, labels: ((outputs - labels) ** 2).mean(),
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
    }
    engine = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
    batches = itertools.repeat((torch.ones(1, 4), torch.zeros(1, 4)))
    seconds = []
    for _ in range(STEPS + 1):
        torch.distributed.barrier()
        started = time.perf_counter()
        engine.train_batch(batches)
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def result_of(stages: int, micro_batches: int, seconds: float) -> dict[str, float]:
    """Returns formula and measurement side by side. A stage is busy for m forward and m backward passes."""
    busy = micro_batches * (FORWARD_S + BACKWARD_S)
    predicted = busy / (1 - bubble_of(stages, micro_batches))
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "predicted_step_s": round(predicted, 4),
        "measured_step_s": round(seconds, 4),
        "step_error": round(seconds / predicted - 1, 4),
        "predicted_bubble": round(bubble_of(stages, micro_batches), 4),
        "measured_bubble": round(1 - busy / seconds, 4),
    }


def work(rank: int, port: int) -> None:
    """Runs one rank; rank 0 writes the result."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rows = [result_of(stages, micro, measure(stages, micro)) for stages, micro in CASES]
    if rank == 0:
        RESULT.write_text(json.dumps(document(rows), indent=2) + "\n", encoding="utf-8")
    torch.distributed.destroy_process_group()


def document(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Returns the result together with a description of the machine."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    packages = {name: metadata.version(name) for name in ("torch", "deepspeed")}
    return {
        "command": "python benchmarks/bubble.py",
        "commit": commit,
        "hardware": f"{os.cpu_count()} × {platform.machine()} CPU, {WORLD} processes that sleep, gloo",
        "versions": {"python": platform.python_version(), **packages},
        "forward_s": FORWARD_S,
        "backward_s": BACKWARD_S,
        "steps": STEPS,
        "rows": rows,
    }


def main() -> None:
    """Starts the ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(work, args=(port,), nprocs=WORLD)  # type: ignore[attr-defined]
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
