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
from llmtrain.errors import Exit
from llmtrain.launch import Rank, discover
from llmtrain.plan import Plan
from llmtrain.run_dir import RunDir, identity_of
from llmtrain.signals import StopSignals, leave

if TYPE_CHECKING:
    from llmtrain.checkpoint.resume import Choice
    from llmtrain.checkpoint.save import Saver
    from llmtrain.checkpoint.state import TrainerState
    from llmtrain.checkpoint.storage import Storage
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
    """Trains as `rank`; leaves the process with the exit code of its failure, or 75 where a signal stopped it.

    resume: `auto`, `never` or a checkpoint folder. max_steps: step to stop after.
    """
    signals = StopSignals()
    output = take_over_output(run_dir, rank)
    try:
        code = _train(rank, run_dir, plan, ds_config, resume, max_steps, signals, output)
    except BaseException as error:
        # Not sys.exit: a process group whose other ranks wait in a collective cannot be torn down.
        os._exit(output.report_failure(error))
    if code != Exit.DONE:
        leave(code)


def _train(
    rank: Rank,
    run_dir: RunDir,
    plan: Plan,
    ds_config: dict[str, object],
    resume: str,
    max_steps: int | None,
    signals: StopSignals,
    output: WorkerOutput,
) -> Exit:
    from llmtrain.data import Progress, Schedule, prepare

    prepared = prepare(plan.recipe, Progress(output.console))
    with output.console.status("starting torch and DeepSpeed"):
        from torch import distributed as dist

        from llmtrain.checkpoint.save import Saver
        from llmtrain.checkpoint.storage import probe
        from llmtrain.engines import build_engine
        from llmtrain.engines.distributed import init_process_group
        from llmtrain.loop import TooManySkippedError
        from llmtrain.rollback import Trouble, go_back

        device = init_process_group(rank, plan.cluster.spec.on_cpu)
        storage = probe(run_dir.checkpoints)
        # A checkpoint is checked before the engine is built: a damaged one costs no minutes.
        choice = _choose(run_dir, plan, resume, storage, output)
        engine = build_engine(plan, ds_config, device)
        state = _start(run_dir, plan, engine, choice, prepared.key, storage)
    data = Schedule.of(plan, prepared, dp_rank=engine.data_parallel_rank)
    if rank.is_main:
        shutil.copytree(prepared.tokenizer_dir, run_dir.tokenizer, dirs_exist_ok=True)
        print(f"engine: {engine.describe()}")
    stop_step = min(max_steps or plan.recipe.train.max_steps, plan.recipe.train.max_steps)
    saver = Saver(run_dir.checkpoints, plan, engine, _run_id(run_dir), storage, output.warn)
    while True:
        try:
            stopped = _fit(rank, run_dir, plan, engine, data, saver, state, stop_step, signals, output)
            break
        except TooManySkippedError as error:
            saver.settle()
            go_back(Trouble(plan, state, error.skipped), engine, run_dir.checkpoints, saver.run, storage)
            told = (
                f"too many updates skipped: back to step {state.step:,}, on with sample {state.samples:,} of the data"
            )
            output.console.print(told, highlight=False)
    dist.destroy_process_group()
    if stopped:
        return Exit.RESUME
    if rank.is_main:
        signals.leave_at_once()
        from llmtrain.finish import finish

        finish(run_dir, plan, state, prepared, output.console)
    return Exit.DONE


def _fit(
    rank: Rank,
    run_dir: RunDir,
    plan: Plan,
    engine: Engine,
    data: Schedule,
    saver: Saver,
    state: TrainerState,
    stop_step: int,
    signals: StopSignals,
    output: WorkerOutput,
) -> bool:
    """Whether a signal stopped it."""
    from llmtrain.engines.distributed import barrier
    from llmtrain.loop import Run, fit
    from llmtrain.metrics import MetricsLogger, TrainingProgress
    from llmtrain.signals import Agreement

    if state.step:
        output.console.print(f"continuing after step {state.step:,}", highlight=False)
    metrics = MetricsLogger(run_dir, plan, state.step) if rank.is_main else None
    try:
        with TrainingProgress(output.console, stop_step, state.step) as progress:
            stop = Agreement.of_group(signals, attempt=state.rollbacks)
            skipped = engine.guard.read().total
            fit(Run(plan.recipe, engine, data, saver, state, stop_step, progress, stop, metrics, skipped))
            progress.summary()
    finally:
        if metrics:
            metrics.close()
    if stop.stopped_by is None:
        return False
    barrier()  # rank 0 keeps the store that the others have just read the verdict from
    told = f"stopped on {stop.stopped_by.name} after step {state.step:,}; the same command continues"
    output.console.print(told, highlight=False)
    return True


def _run_id(run_dir: RunDir) -> str:
    """Identity of the run; its file may lie on rank 0's node only."""
    from llmtrain.checkpoint.agree import broadcast
    from llmtrain.engines.distributed import rank

    return broadcast(run_dir.read_id() if rank() == 0 else "")


def _choose(run_dir: RunDir, plan: Plan, resume: str, storage: Storage, output: WorkerOutput) -> Choice | None:
    """The verified checkpoint to go on from, and a word on newer ones that are not whole; None for a new run."""
    from llmtrain.checkpoint.resume import choose_named, choose_newest

    if resume == "never":
        return None
    with output.console.status("checking checkpoints"):
        if resume != "auto":
            return choose_named(Path(resume), _run_id(run_dir), identity_of(plan.recipe), storage)
        choice = choose_newest(run_dir.checkpoints, _run_id(run_dir), storage)
    if choice:
        for problem in choice.rejected:
            output.warn(str(problem))
        if choice.rejected:
            output.console.print(f"falling back to {choice.folder.name}", highlight=False)
    return choice


def _start(
    run_dir: RunDir, plan: Plan, engine: Engine, choice: Choice | None, data: str, storage: Storage
) -> TrainerState:
    """The state to start from."""
    from llmtrain.checkpoint.resume import go_on_from
    from llmtrain.checkpoint.state import begin, restore

    if choice is None:
        return begin(plan, data)
    state = restore(choice.folder, choice.manifests, storage, engine, plan, data)
    go_on_from(choice, run_dir.checkpoints, storage)
    return state


if __name__ == "__main__":
    typer.run(main)
