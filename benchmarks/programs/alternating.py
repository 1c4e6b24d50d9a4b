"""Alternates steps of several plans of a recipe in the same two processes; prints a line of JSON.

python -m benchmarks.programs.alternating --turns 12 --set batch.micro_batch_size=2 \\
    --plan zero1:parallel.zero_stage=1 --plan zero3:parallel.zero_stage=3

A machine's speed drifts by more than what is to be measured, but steps that follow each other see the same drift. The
engines are those that train, and the first plan is what the others are compared with.
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


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], dest="fields")
    parser.add_argument("--plan", action="append", required=True, dest="plans", metavar="NAME:FIELD=VALUE,…")
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    plans = {
        name: [*options.fields, *fields.split(",")] for name, _, fields in (p.partition(":") for p in options.plans)
    }
    with reserved_port() as port:
        torch.multiprocessing.spawn(work, args=(port, plans, options.turns), nprocs=RANKS)  # type: ignore[attr-defined]


def work(rank: int, port: int, plans: dict[str, list[str]], turns: int) -> None:
    """Runs one rank; rank 0 prints the result."""
    torch.set_num_threads(1)
    init_process_group(Rank(rank, rank, RANKS, RANKS, "127.0.0.1", port, "benchmark"), on_cpu=True)
    engines = {name: _engine(fields) for name, fields in plans.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(turns + 1):
        for name, (engine, batch) in engines.items():
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
    engine = build_engine(plan, render(plan), torch.device("cpu"))
    return engine, BatchLoader.of(plan, prepare(recipe), dp_rank=engine.data_parallel_rank).train_batch(0)


def numbers(times: dict[str, list[float]]) -> dict[str, float]:
    """Returns the median step of each plan, and the median of the first one's steps relative to those that follow."""
    found = {f"{name}_ms": 1000 * statistics.median(taken) for name, taken in times.items()}
    base, *others = times
    first = times[base]
    for name in others:
        found[name] = statistics.median(one / other for one, other in zip(first, times[name], strict=True))
    return found


if __name__ == "__main__":
    main()
