"""The work of each rank of a dry run.

It trains, saves and takes a step, then loads the checkpoint into a new engine and takes the same step again.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import time
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.data import BatchLoader, Prepared
from llmtrain.data.loader import rows_of
from llmtrain.data.synthetic import synthetic
from llmtrain.engines import Engine, build_engine
from llmtrain.engines.divergence import estimate_divergence
from llmtrain.engines.reference_model import with_references
from llmtrain.engines.runtime.agree import gather
from llmtrain.errors import CheckpointError, Problem, WorkerError, abbreviate
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.system.durable import write_atomically
from llmtrain.trials.dry_run.job import RESULT_FILE, Checkpoint, DryRunJob, DryRunResult, DryRunStep, RankFacts
from llmtrain.trials.dry_run.shrink import STEPS
from llmtrain.trials.jobs import Say

TIMEOUT_S = 300
"""Seconds after which a rank that waits for another gives up; its log then shows where it waited."""


def run_rank(job: DryRunJob, folder: Path, device: torch.device, say: Say) -> None:
    """Runs the dry run on this rank; rank 0 writes the result to `folder`.

    Raises WorkerError if a number is not finite, and CheckpointError if the loaded checkpoint continues differently.
    """
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    plan, checkpoints = job.plan, Path(job.checkpoints)
    prepared = synthetic(plan.recipe, Path(job.data))
    torch.manual_seed(plan.recipe.train.seed + dist.get_rank() // plan.parallel.tensor)
    engine = build_engine(plan, render(plan), device)
    prepared = with_references(engine, plan, prepared)
    data = BatchLoader.of(plan, prepared, engine.data_parallel_rank)
    described = engine.describe()
    say(f"engine: {described}\n")
    facts = _facts(plan, engine)
    state = TrainerState(data=prepared.key)
    steps = [_step(engine, data, state, say) for _ in range(STEPS - 1)]
    evaluation = plan.recipe.evaluation
    eval_loss = _evaluate(engine, data, evaluation.max_sequences) if evaluation.every_steps else None
    started = time.perf_counter()
    Saver(checkpoints, plan, engine).save(state)
    saved = time.perf_counter() - started
    steps.append(_step(engine, data, state, say))
    weights = _weights(engine)
    del engine
    gc.collect()  # an engine and its hooks refer to each other
    loaded = _repeat_last_step(plan, prepared, checkpoints, device, steps[-1], weights)
    say(f"saved after step {STEPS - 1}, loaded into new engines: step {STEPS} is the same again\n")
    result = DryRunResult(
        engine=described,
        steps=tuple(steps),
        eval_loss=eval_loss,
        checkpoint=_measured(checkpoints, saved, loaded),
        ranks=tuple(gather(facts)),
    )
    if dist.get_rank() == 0:
        write_atomically(folder / RESULT_FILE, result.model_dump_json())
    faulthandler.cancel_dump_traceback_later()


def _step(engine: Engine, data: BatchLoader, state: TrainerState, say: Say) -> DryRunStep:
    started = time.perf_counter()
    batch = data.train_batch(state.samples)
    result = engine.train_step(batch)
    state.step += 1
    state.samples += batch.samples
    state.tokens += batch.target_tokens
    step = DryRunStep(
        loss=result.loss.item(),
        grad_norm=result.grad_norm.item(),
        lr=result.lr,
        seconds=time.perf_counter() - started,
    )
    if not (math.isfinite(step.loss) and math.isfinite(step.grad_norm)):
        message = f"step {state.step}: loss {step.loss}, gradient norm {step.grad_norm}"
        raise WorkerError(Problem("dry_run.finite", f"rank {dist.get_rank()}", message, "see its log"))
    say(f"step {state.step}: loss {step.loss:.4f}, gradient norm {step.grad_norm:.4f}\n")
    return step


def _evaluate(engine: Engine, data: BatchLoader, max_sequences: int | None) -> float:
    """Returns the mean loss over the first held-out sequences."""
    total, targets = 0.0, 0
    if engine.objective and engine.objective.needs_divergence:
        estimate_divergence(engine, data.eval_batches(max_sequences))
    for batch in data.eval_batches(max_sequences):
        total += engine.eval_step(batch).item() * batch.num_items
        targets += batch.num_items
    return total / max(1, targets)


def _repeat_last_step(
    plan: Plan,
    prepared: Prepared,
    checkpoints: Path,
    device: torch.device,
    expected: DryRunStep,
    weights: dict[str, Tensor],
) -> float:
    """Repeats the last step from the checkpoint; returns the seconds until it could. Raises CheckpointError."""
    torch.manual_seed(0)  # as in another process: the checkpoint restores the random state
    started = time.perf_counter()
    engine = build_engine(plan, render(plan), device)
    folder = newest(checkpoints)
    assert folder is not None, "it was just saved"
    state = load(folder, engine, plan, prepared.key)
    seconds = time.perf_counter() - started
    again = _step(engine, BatchLoader.of(plan, prepared, engine.data_parallel_rank), state, lambda _: None)
    restored = _weights(engine)
    differences = [
        f"{name} {getattr(again, name)!r} instead of {getattr(expected, name)!r}"
        for name in ("loss", "grad_norm", "lr")
        if getattr(again, name) != getattr(expected, name)
    ]
    differences += [
        f"{name} differs" for name in weights if name not in restored or not torch.equal(restored[name], weights[name])
    ]
    if differences:
        message = f"continues differently from the run that wrote it: {abbreviate(differences, 3)}"
        raise CheckpointError(Problem("dry_run.checkpoint", f"rank {dist.get_rank()}, {folder.name}", message))
    return seconds


def _weights(engine: Engine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.named_weights()}


def _facts(plan: Plan, engine: Engine) -> RankFacts:
    replica, micro_steps = engine.data_parallel_rank, range(plan.batch.gradient_accumulation_steps)
    return RankFacts(
        rank=dist.get_rank(),
        data_rank=replica,
        samples=tuple(rows_of(step, replica, plan.readers, plan.read_size).start for step in micro_steps),
    )


def _measured(checkpoints: Path, save_s: float, load_s: float) -> Checkpoint:
    folder = newest(checkpoints)
    assert folder is not None, "it was just loaded"
    files = [path for path in folder.rglob("*") if path.is_file()]
    return Checkpoint(
        after_step=STEPS - 1,
        files=len(files),
        size=sum(path.stat().st_size for path in files),
        save_s=save_s,
        load_s=load_s,
    )
