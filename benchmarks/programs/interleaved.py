"""Alternates a few steps of our whole worker and of a bare loop in one process; measures our overhead in ms per step.

python -m benchmarks.programs.interleaved --peer deepspeed --ranks 2 --set parallel.zero_stage=1

A machine's speed drifts by more than the half percent to be measured, but two loops that run within the same second see
the same drift. The worker is the real one, with launcher, watcher, metrics, guard, data and decisions about stopping.
After each block of its steps, when it reports its progress, the bare loop takes the same number of steps with the same
model, positions and tokens, which are already in memory. The time between two such calls is ours; the time inside a
call is the peer's. Prints one line of JSON with the medians over blocks, in ms per step, and the medians of the
differences between neighbouring blocks. Both are given for wall time and for the CPU time of the training thread alone,
which is less sensitive to other load on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.errors import Exit
from llmtrain.launch import discover
from llmtrain.launch.local import run_workers
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.plan.load import load_recipe
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import local_cluster
from llmtrain.run_dir import RunDir

RECIPE = "recipes/tiny.py"
ALONE = (
    *("evaluation.every_steps=0", "checkpoint.every_steps=100000", "export.at_end=false"),
    *("export.sample_prompt=null", "train.max_steps=100000"),
    *("model.attention=sdpa", "kernels.blocks=eager", "kernels.loss=whole"),
    *("kernels.matmul=torch", "kernels.threads=1"),
)
"""Neither loop evaluates, saves or exports."""
WARM_BLOCKS = 3
KEPT_BATCHES = 16
"""Number of batches that the bare loop repeats."""


class Turns:
    """Runs blocks of the peer's steps between ours and records the times of both."""

    def __init__(self, peer: Iterator[None], block: int, blocks: int, out: Path) -> None:
        self.peer, self.block, self.blocks, self.out = peer, block, blocks, out
        self.times: dict[str, list[float]] = {name: [] for name in ("ours_s", "peer_s", "ours_cpu_s", "peer_cpu_s")}
        self._begun: tuple[float, float] | None = None

    def after_step(self, step: int) -> None:
        """Is called by our loop after each of its steps."""
        if step % self.block:
            return
        from llmtrain.engines.runtime.distributed import barrier

        _wait()
        if self._begun is not None:
            self._note("ours", self._begun)
        time.sleep(0.02)  # work that our data thread has begun ends here and counts for neither side
        barrier()
        begun = _now()
        for _ in range(self.block):
            next(self.peer)
        _wait()
        if self._begun is not None:
            self._note("peer", begun)
        barrier()
        if len(self.times["peer_s"]) == self.blocks + WARM_BLOCKS:
            self.out.write_text(json.dumps(self.times))
            os._exit(0)
        self._begun = _now()

    def _note(self, side: str, begun: tuple[float, float]) -> None:
        for name, before, after in zip((f"{side}_s", f"{side}_cpu_s"), begun, _now(), strict=True):
            self.times[name].append(after - before)


def _wait() -> None:
    """Waits until the device has finished its work."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _now() -> tuple[float, float]:
    """Returns wall time and CPU time of this thread in seconds."""
    return time.perf_counter(), time.thread_time()


def child(options: argparse.Namespace) -> None:
    """Runs one rank."""
    from llmtrain.train import metrics
    from llmtrain.train.signals import StopSignals
    from llmtrain.train.worker import train_rank

    rank = discover(os.environ, sys.argv)
    assert rank is not None, "started by the launcher"
    folder = RunDir(Path(options.child))
    plan = folder.read_plan()
    config = folder.read_ds_config()
    turns: list[Turns] = []
    out = folder.path / f"turns_{rank.rank}.json"

    def advance(progress: metrics.TrainingProgress, step: int) -> None:
        own(progress, step)
        if not turns:
            peer = peer_of(options.peer, plan, config, rank.rank, rank.local_rank)
            turns.append(Turns(peer, options.block, options.blocks, out))
        turns[0].after_step(step)

    own = metrics.TrainingProgress.advance
    metrics.TrainingProgress.advance = advance  # type: ignore[method-assign, assignment]
    train_rank(rank, folder, plan, config, resume="never", signals=StopSignals())


def peer_of(kind: str, plan: Plan, config: dict[str, Any], rank: int, local_rank: int) -> Iterator[None]:
    """Returns the bare loop, with a model and batches like ours."""
    import torch
    from torch._C._distributed_c10d import Work

    from benchmarks.programs.bare import deepspeed_steps, torch_steps
    from llmtrain.data import BatchLoader, prepare
    from llmtrain.models import build_model
    from llmtrain.models.precision import weight_dtype

    recipe = plan.recipe
    schedule = BatchLoader.of(plan, prepare(recipe), dp_rank=rank)
    steps = [schedule.train_batch(number * plan.batch.global_batch_size) for number in range(KEPT_BATCHES)]
    batches = itertools.cycle(
        [[(one.input_ids, one.position_ids, one.labels) for one in step.micro_batches] for step in steps]
    )
    device = torch.device("cpu") if plan.cluster.spec.on_cpu else torch.device("cuda", local_rank)
    model = build_model(recipe, weight_dtype(recipe.parallel.precision), device)
    model.train()
    arguments = (recipe.optim, recipe.train.steps, recipe.logging.every_steps)
    if kind == "torch":
        taken = torch_steps(model, batches, *arguments)
    else:
        taken = deepspeed_steps(model, dict(config), batches, *arguments)
    return without_watch(taken, Work)


def without_watch(steps: Iterator[None], work: Any) -> Iterator[None]:
    """Runs the steps with torch's own `Work.wait`, which our worker has replaced in this process."""
    watched = work.wait
    while True:
        if hasattr(watched, "__closure__") and "wait" in watched.__code__.co_freevars:
            work.wait = watched.__closure__[watched.__code__.co_freevars.index("wait")].cell_contents
        try:
            next(steps)
        finally:
            work.wait = watched
        yield


def result_of(turns: list[dict[str, list[float]]], block: int) -> dict[str, float]:
    """Computes the result from the blocks of rank 0, because all ranks end a step together."""
    found: dict[str, float] = {"blocks": len(turns[0]["ours_s"]) - WARM_BLOCKS}
    for clock in ("", "cpu_"):
        ours, peer = (turns[0][f"{side}_{clock}s"][WARM_BLOCKS:] for side in ("ours", "peer"))
        more = [(mine - other) / block * 1000 for mine, other in zip(ours, peer, strict=True)]
        found[f"ours_{clock}ms"] = statistics.median(ours) / block * 1000
        found[f"peer_{clock}ms"] = statistics.median(peer) / block * 1000
        found[f"more_{clock}ms"] = statistics.median(more)
        # The standard error of a median is 1.2533 times that of a mean; the deviation is estimated from the quartiles,
        # because a few blocks are disturbed.
        low, _, high = statistics.quantiles(more, n=4)
        found[f"error_{clock}ms"] = 1.2533 * ((high - low) / 1.349) / len(more) ** 0.5
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    """Starts the ranks, or runs as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("deepspeed", "torch"), default="deepspeed")
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--block", type=int, default=4, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], dest="fields")
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    recipe, _ = load_recipe(options.recipe, [*ALONE, *options.fields])
    cluster = local_cluster(options.ranks)
    plan = resolve(recipe, cluster)
    os.environ["DS_ACCELERATOR"] = "cpu" if cluster.spec.on_cpu else "cuda"
    with tempfile.TemporaryDirectory() as name:
        folder = RunDir(Path(name) / "run")
        folder.create(plan, render(plan))
        command = [sys.executable, "-m", "benchmarks.programs.interleaved", "--child", str(folder.path)]
        command += ["--peer", options.peer, "--block", str(options.block), "--blocks", str(options.blocks)]
        code = run_workers(command, options.ranks, folder)
        if code != Exit.DONE:
            raise SystemExit(code)
        turns = [json.loads((folder.path / f"turns_{rank}.json").read_text()) for rank in range(options.ranks)]
    print(json.dumps(result_of(turns, options.block)))


if __name__ == "__main__":
    main()
