"""Measures how long the ranks of a pipeline wait under each schedule, and writes results/bubble.json.

python benchmarks/bubble.py

Stages sleep instead of computing. The measurement therefore covers only the schedule, and two cores are enough for four
ranks. The engine is the one that trains: llmtrain's passes over gloo, and DeepSpeed's optimizer.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import short_facts
from llmtrain.engines.runtime.distributed import init_process_group
from llmtrain.launch.discovery.rank import Rank
from llmtrain.launch.rendezvous import reserved_port
from llmtrain.plan.schedules import PipelineSchedule

CASES = (
    (PipelineSchedule("1f1b", 2, 1), 8),
    (PipelineSchedule("1f1b", 4, 1), 8),
    (PipelineSchedule("interleaved", 4, 2), 8),
    (PipelineSchedule("zero_bubble", 4, 2), 8),
    (PipelineSchedule("zero_bubble", 4, 4), 8),
)
"""Pairs of a schedule and a number of micro-batches."""
FORWARD_S, BACKWARD_S = 0.8, 1.6
"""Seconds of a rank's forward and backward pass over a micro-batch, divided among its stages. A forward pass includes
the few milliseconds that its small layer computes. A backward pass takes that computing time in addition."""
STEPS = 2
WORLD = 4
LENGTH = 4
RESULT = Path(__file__).parent / "results" / "bubble.json"


class _Sleep(torch.autograd.Function):
    """The identity function, which sleeps in the forward and the backward pass and can delay half of the latter."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, started: float, chunks: int, delayed: Any) -> Tensor:
        ctx.seconds, ctx.delayed = BACKWARD_S / chunks, delayed
        time.sleep(max(0.0, started + FORWARD_S / chunks - time.perf_counter()))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        seconds = ctx.seconds
        if ctx.delayed is not None:
            seconds /= 2
            ctx.delayed.keep(lambda: time.sleep(seconds))
        time.sleep(seconds)
        return gradients[0], None, None, None


def measure(schedule: PipelineSchedule, micro_batches: int) -> float:
    """Returns the median seconds of a step, without the first one. All ranks must call it."""
    from llmtrain.data import MicroBatch, StepBatch
    from llmtrain.engines import build_engine
    from llmtrain.plan.ds_config import render
    from llmtrain.plan.rules import resolve
    from llmtrain.recipe import (
        BatchConfig,
        DataConfig,
        ModelConfig,
        OptimConfig,
        ParallelConfig,
        Recipe,
        Source,
        TrainConfig,
    )
    from llmtrain.recipe.cluster import Cluster

    replicas = WORLD // schedule.ranks
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 16}
    recipe = Recipe(
        name="bubble",
        model=ModelConfig(architecture="llama", config=sizes | {"num_hidden_layers": schedule.stages}),
        data=DataConfig(sources=[Source("none")], tokenizer="none", sequence_length=LENGTH),
        optim=OptimConfig(lr=1e-3),
        batch=BatchConfig(global_batch_size=micro_batches * replicas, micro_batch_size=1),
        parallel=ParallelConfig.model_validate(
            {
                "zero_stage": 1,
                "pipeline": schedule.ranks,
                "pipeline_schedule": schedule.name,
                "pipeline_chunks": schedule.chunks,
            }
        ),
        train=TrainConfig(max_steps=STEPS + 1),
    )
    plan = resolve(recipe, Cluster(devices_per_node=WORLD))
    engine: Any = build_engine(plan, render(plan), torch.device("cpu"))
    for stage in engine.module.stages:
        stage.forward = _sleeping(stage.forward, schedule.chunks, engine.pipeline.passes.delayed)
    tokens = torch.ones(1, LENGTH, dtype=torch.int64)
    micro = MicroBatch(tokens, torch.arange(LENGTH)[None], tokens)
    targets = LENGTH * micro_batches * replicas
    batch = StepBatch([micro] * micro_batches, targets, micro_batches * replicas, 0)
    seconds = []
    for _ in range(STEPS + 1):
        torch.distributed.barrier()
        started = time.perf_counter()
        engine.train_step(batch)
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _sleeping(forward: Any, chunks: int, delayed: Any) -> Any:
    """Returns the forward pass of a stage with added sleep."""

    def run(inputs: Any) -> Any:
        started = time.perf_counter()
        output = forward(inputs)
        if isinstance(output, Tensor):
            return _Sleep.apply(output, started, chunks, delayed)  # type: ignore[no-untyped-call]
        return _Sleep.apply(output[0], started, chunks, delayed), *output[1:]  # type: ignore[no-untyped-call]

    return run


def result_of(schedule: PipelineSchedule, micro_batches: int, seconds: float) -> dict[str, float | str]:
    """Returns prediction and measurement side by side.

    A rank is busy for one forward and one backward pass per micro-batch.
    """
    busy = micro_batches * (FORWARD_S + BACKWARD_S)
    bubble = schedule.bubble(micro_batches)
    predicted = busy / (1 - bubble)
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "chunks": schedule.chunks,
        "micro_batches": micro_batches,
        "predicted_step_s": round(predicted, 4),
        "measured_step_s": round(seconds, 4),
        "step_error": round(seconds / predicted - 1, 4),
        "predicted_bubble": round(bubble, 4),
        "measured_bubble": round(1 - busy / seconds, 4),
    }


def work(rank: int, port: int) -> None:
    """Runs one rank. Rank 0 writes the result."""
    torch.set_num_threads(1)
    init_process_group(Rank(rank, rank, WORLD, WORLD, "127.0.0.1", port, "benchmark"), on_cpu=True)
    rows = [result_of(schedule, micro, measure(schedule, micro)) for schedule, micro in CASES]
    if rank == 0:
        RESULT.write_text(json.dumps(document(rows), indent=2) + "\n", encoding="utf-8")
    torch.distributed.destroy_process_group()


def document(rows: list[dict[str, float | str]]) -> dict[str, Any]:
    """Returns the result together with a description of the machine."""
    hardware = f"{os.cpu_count()} × {platform.machine()} CPU, {WORLD} processes that sleep, gloo"
    return {
        **short_facts("python benchmarks/bubble.py", hardware, "torch", "deepspeed"),
        "forward_s": FORWARD_S,
        "backward_s": BACKWARD_S,
        "steps": STEPS,
        "rows": rows,
    }


def main() -> None:
    """Starts the ranks."""
    with reserved_port() as port:
        torch.multiprocessing.spawn(work, args=(port,), nprocs=WORLD)  # type: ignore[attr-defined]
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
