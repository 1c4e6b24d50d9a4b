"""A worker: one rank of a run, whichever launcher started it.

`python -m llmtrain.worker RUN_DIR` is what our own launcher starts; a recipe file started by
torchrun, deepspeed or accelerate arrives at `work` by way of the command line.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.console import WorkerOutput, take_over_output
from llmtrain.launch import Rank, discover
from llmtrain.plan import Plan
from llmtrain.run_dir import RunDir

if TYPE_CHECKING:
    from llmtrain.checkpoint.state import TrainerState
    from llmtrain.data import Schedule
    from llmtrain.engines import Engine


def main(run_dir: Path, resume: str = "auto", max_steps: Annotated[int | None, typer.Option()] = None) -> None:
    """Trains as one rank of the run that a launcher has written to RUN_DIR."""
    rank = discover(os.environ, sys.argv)
    if rank is None:
        raise SystemExit("llmtrain.worker is started by a launcher, which sets RANK; use `llmtrain train`")
    folder = RunDir(run_dir)
    work(rank, folder, folder.read_plan(), folder.read_ds_config(), resume, max_steps)


def work(
    rank: Rank, run_dir: RunDir, plan: Plan, ds_config: dict[str, object], resume: str, max_steps: int | None
) -> None:
    """Trains as `rank`; leaves the process with the exit code of its failure, if it has one.

    resume: `auto`, `never` or a checkpoint folder. max_steps: step to stop after.
    """
    output = take_over_output(run_dir, rank)
    try:
        _train(rank, run_dir, plan, ds_config, resume, max_steps, output)
    except BaseException as error:
        code = output.report_failure(error)
        # Not sys.exit: a process group whose other ranks wait in a collective cannot be torn down.
        os._exit(code)


def _train(
    rank: Rank,
    run_dir: RunDir,
    plan: Plan,
    ds_config: dict[str, object],
    resume: str,
    max_steps: int | None,
    output: WorkerOutput,
) -> None:
    from llmtrain.data import Progress, Schedule, prepare

    prepared = prepare(plan.recipe, Progress(output.console))
    with output.console.status("starting torch and DeepSpeed"):
        from torch import distributed as dist

        from llmtrain.engines import build_engine
        from llmtrain.engines.distributed import init_process_group

        device = init_process_group(rank, plan.cluster.spec.on_cpu)
        engine = build_engine(plan, ds_config, device)
        state = _resume(run_dir, plan, engine, resume, prepared.key)
    data = Schedule.of(plan, prepared, dp_rank=engine.data_parallel_rank)
    if rank.is_main:
        shutil.copytree(prepared.tokenizer_dir, run_dir.tokenizer, dirs_exist_ok=True)
        print(f"engine: {engine.describe()}")
    stop_step = min(max_steps or plan.recipe.train.max_steps, plan.recipe.train.max_steps)
    _fit(rank, run_dir, plan, engine, data, state, stop_step, output)
    dist.destroy_process_group()
    if rank.is_main:
        from llmtrain.finish import finish

        finish(run_dir, plan, state, prepared, output.console)


def _fit(
    rank: Rank,
    run_dir: RunDir,
    plan: Plan,
    engine: Engine,
    data: Schedule,
    state: TrainerState,
    stop_step: int,
    output: WorkerOutput,
) -> None:
    from llmtrain.checkpoint.save import Saver
    from llmtrain.loop import Run, fit
    from llmtrain.metrics import MetricsLogger, TrainingProgress

    if state.step:
        output.console.print(f"continuing after step {state.step:,}", highlight=False)
    metrics = MetricsLogger(run_dir, plan, state.step) if rank.is_main else None
    try:
        with TrainingProgress(output.console, stop_step, state.step) as progress:
            saver = Saver(run_dir.checkpoints, plan, engine)
            fit(Run(plan.recipe, engine, data, saver, state, stop_step, progress, metrics))
            progress.summary()
    finally:
        if metrics:
            metrics.close()


def _resume(run_dir: RunDir, plan: Plan, engine: Engine, resume: str, data: str) -> TrainerState:
    """The state to start from; the generators of a new run are seeded.

    Tensor parallel ranks, which are neighbours, draw alike: what they hold whole they drop alike. All
    others draw apart.
    """
    import torch
    from torch import distributed as dist

    from llmtrain.checkpoint.folder import newest
    from llmtrain.checkpoint.state import TrainerState, load

    # Rank 0 decides, so that no two ranks continue from different checkpoints.
    chosen: list[str | None] = [None]
    if dist.get_rank() == 0 and resume != "never":
        found = newest(run_dir.checkpoints) if resume == "auto" else Path(resume)
        chosen = [str(found) if found else None]
    dist.broadcast_object_list(chosen, src=0)
    if chosen[0] is None:
        torch.manual_seed(plan.recipe.train.seed + dist.get_rank() // plan.layout.tp)
        return TrainerState(data=data)
    return load(Path(chosen[0]), engine, plan, data)


if __name__ == "__main__":
    typer.run(main)
