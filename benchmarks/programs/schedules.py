"""Alternates steps of a pipeline under several schedules in the same two processes; prints a line of JSON.

python -m benchmarks.programs.schedules --turns 12 --set batch.micro_batch_size=2

A machine's speed drifts by more than what is to be measured, but steps that follow each other see the same drift. The
engines are those that train, and the first one, 1F1B, is what the others are compared with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from llmtrain.engines.runtime.distributed import init_process_group
from llmtrain.launch.discovery.rank import Rank
from llmtrain.launch.rendezvous import reserved_port

RECIPE = "recipes/tiny.py"
RANKS = 2
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zero_bubble": 2}
"""Schedule → its stages on each rank."""


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], dest="fields")
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    with reserved_port() as port:
        arguments = (port, options.fields, options.turns)
        torch.multiprocessing.spawn(work, args=arguments, nprocs=RANKS)  # type: ignore[attr-defined]


def work(rank: int, port: int, fields: list[str], turns: int) -> None:
    """Runs one rank; rank 0 prints the result."""
    torch.set_num_threads(1)
    init_process_group(Rank(rank, rank, RANKS, RANKS, "127.0.0.1", port, "benchmark"), on_cpu=True)
    engines, batch = {}, None
    for name, chunks in SCHEDULES.items():
        chosen = [f"parallel.pipeline_schedule={name}", f"parallel.pipeline_chunks={chunks}"]
        engines[name], batch = _engine([*fields, f"parallel.pipeline={RANKS}", *chosen])
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(turns + 1):
        for name, engine in engines.items():
            torch.distributed.barrier()
            started = time.perf_counter()
            engine.train_step(batch)
            torch.distributed.barrier()
            times[name].append(time.perf_counter() - started)
    if rank == 0:
        print(json.dumps(numbers({name: taken[1:] for name, taken in times.items()})))
    torch.distributed.destroy_process_group()


def _engine(fields: list[str]) -> tuple[Any, Any]:
    """Returns the engine of a recipe, and a batch for its steps."""
    from llmtrain.data import BatchLoader, prepare
    from llmtrain.engines import build_engine
    from llmtrain.plan.ds_config import render
    from llmtrain.plan.load import load_recipe
    from llmtrain.plan.rules import resolve
    from llmtrain.recipe.cluster import Cluster

    recipe, _ = load_recipe(RECIPE, fields)
    plan = resolve(recipe, Cluster(devices_per_node=RANKS))
    batch = BatchLoader.of(plan, prepare(recipe), dp_rank=0).train_batch(0)
    return build_engine(plan, render(plan), torch.device("cpu")), batch


def numbers(times: dict[str, list[float]]) -> dict[str, float]:
    """Returns the median step of each schedule, and the median of 1F1B's steps relative to those that follow them."""
    found = {f"{name}_ms": 1000 * statistics.median(taken) for name, taken in times.items()}
    first = times["1f1b"]
    for name in list(times)[1:]:
        found[name] = statistics.median(one / other for one, other in zip(first, times[name], strict=True))
    return found


if __name__ == "__main__":
    main()
