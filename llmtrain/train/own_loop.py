"""The engine of a plan in a training loop of the user's own: `llmtrain.prepare`.

Plan, data, metrics, checkpoints and run directory are those of `llmtrain train`, which continues such a run, and the
other way round. The loop decides when to evaluate and to save.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch import distributed as dist

from llmtrain.checkpoint.export import export
from llmtrain.checkpoint.folder import newest, step_of
from llmtrain.checkpoint.resume import choose, go_on_from
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import begin, load, restore
from llmtrain.checkpoint.storage import probe
from llmtrain.data import BatchLoader, MicroBatch, Prepared, Progress, StepBatch, prepare, with_max_steps
from llmtrain.engines import OwnPasses, StepResult, build_engine
from llmtrain.engines.engine import ChangeGradients
from llmtrain.engines.reference_model import with_references
from llmtrain.engines.runtime.agree import broadcast, check_same_code
from llmtrain.engines.runtime.distributed import agreed_secret, barrier, init_process_group
from llmtrain.errors import DivergedError, Exit, Problem, RecipeError, UserError
from llmtrain.launch import Rank
from llmtrain.launch.authentication import Secret
from llmtrain.launch.discovery.interfaces import set_interfaces
from llmtrain.launch.disks import check_disks
from llmtrain.plan import Plan
from llmtrain.plan.ds_config import render
from llmtrain.recipe import Recipe
from llmtrain.recipe.cluster import Cluster, local_cluster
from llmtrain.run_dir import RunDir
from llmtrain.run_dir.lock import RunLock
from llmtrain.system.host import bound_pinned_memory
from llmtrain.system.kernel_caches import use_kernel_caches
from llmtrain.system.stops import after_step, leave, say
from llmtrain.system.streams import plain_console, quiet_libraries
from llmtrain.train import loop
from llmtrain.train.callbacks import Callbacks, Requests
from llmtrain.train.metrics import MetricsLogger, TrainingProgress, note_event
from llmtrain.train.metrics.expert_load import expert_load_of
from llmtrain.train.profiling import StepProfiler
from llmtrain.train.signals import StopAgreement, StopSignals
from llmtrain.train.start import print_plan, startable
from llmtrain.train.tune.request import with_kernels

UNREAD = (
    *("evaluation.every_steps", "evaluation.at_start", "checkpoint.every_steps", "samples", "tasks"),
    *("export.at_end", "export.sample_prompt"),
)
"""Fields of a recipe that say what `llmtrain train` does between the steps, which is up to a loop of one's own."""


class TrainingEngine:
    """Trains a plan in a loop of the user's own. All ranks call every method together.

    `train_step` runs the passes and the update of a step. `accumulate` leaves the passes to the loop.
    """

    def __init__(self, plan: Plan, run: loop.Run, run_dir: RunDir, stop: _Stop, lock: RunLock | None) -> None:
        self.plan = plan
        self.run_dir = run_dir
        self._run, self._stop, self._lock = run, stop, lock
        self._passes: OwnPasses | None = None
        atexit.register(self.close)
        self._waited = 0.0
        """Seconds spent waiting for the batch of the current step."""

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return self._run.state.step

    @property
    def rank(self) -> int:
        """Index of this process among all ranks."""
        return dist.get_rank()

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._run.engine.device

    @property
    def stopped(self) -> str:
        """Why the data have ended before the last step of the recipe: a signal, or a callback; otherwise empty."""
        signal = self._run.stop.stopped_by
        return f"on {signal.name}" if signal else self._run.state.ended

    def train_step(self, batch: StepBatch) -> StepResult:
        """Takes an optimizer step: passes, clipping, and an update unless the guard skips it.

        The loss is that of the recipe. Raises DivergedError if the guard has skipped more updates than it may.
        """
        return self._finish(self._run.engine.train_step(batch, self._change_gradients), batch)

    @contextmanager
    def accumulate(self, batch: StepBatch, num_items: int | None = None) -> Iterator[OwnPasses]:
        """Returns the context of an optimizer step whose passes the loop makes; the update follows at its end.

            with engine.accumulate(batch) as micro_batches:
                for micro_batch in micro_batches:
                    outputs = engine.model(micro_batch)
                    engine.backward(my_loss(outputs.logits, micro_batch.labels))
            print(micro_batches.result.loss)

        It yields this rank's micro-batches: with sequence parallelism, its slices of them. num_items: what the sum of
        the losses of the whole global batch is divided by; default: its number of target tokens, `batch.num_items`.
        Raises RecipeError if a micro-batch has no backward pass, for pipelines, which make their passes themselves, and
        for recipes with an objective of their own. An exception in the context ends the run.
        """
        objective = self.plan.recipe.objective
        if self._run.engine.objective is not None:
            message = f"{objective.name} is the loss of the recipe, but the passes of this loop have their own"
            fix = "call engine.train_step, or leave `objective` out of the recipe"
            raise RecipeError(Problem("loop.objective", "objective.name", message, fix))
        with self._run.engine.own_passes(replace(batch, examples=num_items), self._change_gradients) as passes:
            self._passes = passes
            try:
                yield passes
            finally:
                self._passes = None
        self._finish(passes.result, batch)

    def model(self, micro_batch: MicroBatch) -> Any:
        """Returns the model's output, with `logits` [micro_batch_size, T, vocabulary]; within `accumulate`."""
        return self._current_passes("model").model(micro_batch)

    def backward(self, loss_sum: Tensor) -> Tensor:
        """Accumulates the gradients of a micro-batch, within `accumulate`.

        loss_sum: a scalar, the sum of the losses of the micro-batch, not their mean: ranks and micro-batches have
        different numbers of targets. The loss of the router of a mixture of experts is added. Returns the part of the
        micro-batch in the mean loss over the global batch, as far as this rank computes it.
        """
        return self._current_passes("backward").backward(loss_sum)

    def evaluate(self) -> Mapping[str, Any]:
        """Evaluates all sets with the loss of the recipe, and logs the result; returns the metrics as they are logged.

        `eval_loss` is the mean over all items of the set without a name.
        """
        with self._run.meter.paused():
            self._follow(loop.evaluate(self._run))
        return dict(self._run.state.eval_metrics)

    def save(self) -> Path:
        """Saves a checkpoint, and returns its folder. Raises CheckpointError on every rank if it cannot be written."""
        loop.save(self._run)
        loop.finish_save(self._run)
        assert self._run.saver.written is not None, "a failed save raises an error"
        return self._run.saver.written

    def load(self, checkpoint: str | os.PathLike[str]) -> None:
        """Continues from a checkpoint of this recipe, of any plan; the data go on from its position.

        Raises CheckpointError if it is damaged or belongs to another recipe.
        """
        run = self._run
        run.saver.settle()
        run.state = load(Path(checkpoint), run.engine, self.plan, run.state.data)
        run.callbacks.load(run.state.callbacks)
        run.stop = self._stop.agreement()

    def export(self) -> Path:
        """Writes a Hugging Face folder, and returns it; saves a checkpoint before, if this step has none.

        Raises CheckpointError.
        """
        checkpoint = broadcast(newest(self.run_dir.checkpoints) if self.rank == 0 else None)
        if checkpoint is None or step_of(checkpoint.name) != self.step:
            checkpoint = self.save()
        if self.rank == 0:
            trusts = self.plan.recipe.model.runs_own_code or self.plan.optimizer is not None
            export(checkpoint, self.run_dir.tokenizer, self.run_dir.export, replace=True, trust_remote_code=trusts)
        barrier()
        return self.run_dir.export

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every weight, whole and on the CPU, by its name; all ranks iterate to the end."""
        return self._run.engine.named_weights()

    def close(self) -> None:
        """Ends the run in this process; called at the end of the program if the loop does not call it."""
        atexit.unregister(self.close)
        run = self._run
        loop.finish(run)
        if run.metrics:
            why = self.stopped
            is_done = run.at_end and not run.stop.stopped_by
            note_event(self.run_dir, "finished" if is_done else "stopped", run.state.step, why or "by the loop")
            run.metrics.close()
        if run.stop.stopped_by and self.rank == 0:
            say(self._stopped_line(run.stop.stopped_by))
        run.engine.close()
        dist.destroy_process_group()
        if self._lock:
            self._lock.release()

    def __enter__(self) -> TrainingEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()

    def _stopped_line(self, signal: Signals) -> str:
        """Returns the message for a run that a signal has stopped; a loop may end without a save."""
        saved, step = self._run.saver.written, self._run.state.step
        if saved is not None and step_of(saved.name) == step:
            return after_step(signal, step)
        return f"stopped on {signal.name} after step {step:,}, which is not saved; call engine.save() after the loop"

    def _finish(self, result: StepResult, batch: StepBatch) -> StepResult:
        """Counts and logs a step, and does what the callbacks ask for."""
        try:
            self._follow(loop.end_step(self._run, result, batch, self._waited))
        except loop.TooManySkippedError as error:
            recent = error.skipped.recent
            message = f"the guard has skipped {len(recent)} updates recently: {recent[-1].why()}"
            fix = "engine.load() an earlier checkpoint in a new run; `llmtrain train` does so by itself"
            raise DivergedError(Problem("guard.skipped", "guard.max_skipped", message, fix)) from None
        return result

    @property
    def _change_gradients(self) -> ChangeGradients | None:
        return self._run.callbacks.gradient_hook(self._run.state.step + 1)

    def _follow(self, asked: Requests) -> None:
        if asked.evaluate:
            self.evaluate()
        if asked.save:
            loop.save(self._run)

    def _current_passes(self, name: str) -> OwnPasses:
        if self._passes is None:
            fix = "with engine.accumulate(batch) as micro_batches: ..."
            raise RecipeError(Problem("loop.accumulate", f"engine.{name}", "was called outside of accumulate", fix))
        return self._passes


class TrainingData:
    """This rank's part of each global batch, from the position of the run to its last step.

    On a signal that stops the run, the iteration ends on all ranks after the same step.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine

    def __len__(self) -> int:
        """Number of steps that are left."""
        run = self._engine._run
        return run.stop_step - run.state.step

    def __iter__(self) -> Iterator[StepBatch]:
        """Yields batches. Raises RecipeError if the loop has not taken exactly one step with the last one."""
        run = self._engine._run
        state = run.state
        while run.goes_on:
            with closing(run.data.train_batches(state.samples)) as batches:
                while run.state is state:  # until a checkpoint is loaded
                    batch, self._engine._waited = loop.begin_step(run, batches)
                    step = state.step
                    yield batch
                    if run.state is state and state.step != step + 1:
                        message = f"took {state.step - step} steps with the batch after step {step:,}"
                        fix = "call engine.train_step, or engine.accumulate, once for each batch"
                        raise RecipeError(Problem("loop.step", "the training loop", message, fix))
                    if run.state is state and not run.goes_on:
                        return
            state = run.state


class _Stop:
    """Makes the agreements of the ranks about the step after which they stop."""

    def __init__(self, signals: StopSignals, secret: Secret) -> None:
        self._signals, self._secret, self._attempts = signals, secret, 0

    def agreement(self) -> StopAgreement:
        """Returns another agreement, since decisions about steps that are taken again must not be read."""
        self._attempts += 1
        return StopAgreement(self._signals, self._secret.authenticator, self._attempts)


def prepare_loop(declared: Recipe, rank: Rank, run_dir: RunDir, resume: str) -> tuple[TrainingEngine, TrainingData]:
    """Does what a worker does before its first step: checks, data, process group, engine and checkpoint.

    resume: `auto`, `never` or a checkpoint folder. Raises the errors of `llmtrain train`.
    """
    if dist.is_initialized():
        message = "joins the ranks of the launcher, but this process already belongs to a process group"
        fix = "leave out torch.distributed.init_process_group and deepspeed.init_distributed"
        raise RecipeError(Problem("loop.process_group", "llmtrain.prepare", message, fix))
    # Of torch, about what DeepSpeed calls in each step; the workers of `llmtrain train` have a log for it.
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, r"torch\.distributed")
    signals = StopSignals()
    nodes, per_node = rank.shape
    cluster = Cluster(nodes=nodes, devices_per_node=per_node, device=local_cluster(1).device)
    plan = startable(declared, cluster, run_dir, resume, rank.world_size)
    check_disks(plan)
    if not plan.cluster.spec.on_cpu:
        bound_pinned_memory(os.environ)
    use_kernel_caches(os.environ)
    set_interfaces(rank, plan.cluster.spec.on_cpu)
    lock = None
    if rank.is_main:
        print_plan(plan)
        for line in _unread(plan.recipe):
            say(line)
        lock = RunLock.take(run_dir.path, say)
        run_dir.create(plan, render(plan))
        run_dir.write_launch(rank.launcher, rank.world_size, sys.argv)
    prepared = prepare(plan.recipe, Progress(plain_console(stderr=True)))
    with quiet_libraries():
        device = init_process_group(rank, plan.cluster.spec.on_cpu)
        check_same_code(plan)
        stop = _Stop(signals, agreed_secret(Secret.of_worker(), rank))
        plan = with_kernels(with_max_steps(plan, prepared), device, rank, lambda _: None)
        run = _run(plan, prepared, device, rank, run_dir, resume, stop)
    if rank.is_main:
        template = prepared.chat_template
        run_dir.keep_tokenizer(prepared.tokenizer_dir, template.source if template else None, prepared.stop_ids)
        note_event(run_dir, "started", run.state.step, f"workers: {plan.workers}, launcher: {rank.launcher}")
        if run.state.step:
            say(f"continuing after step {run.state.step:,}")
    torch.set_grad_enabled(True)
    loop.begin(run)
    engine = TrainingEngine(plan, run, run_dir, stop, lock)
    return engine, TrainingData(engine)


def _run(
    plan: Plan, prepared: Prepared, device: torch.device, rank: Rank, run_dir: RunDir, resume: str, stop: _Stop
) -> loop.Run:
    """Builds the parts of a run, and loads the checkpoint that it continues from."""
    storage = probe(run_dir.checkpoints)
    run = broadcast(run_dir.read_id() if rank.is_main else "")
    # A checkpoint is verified before the engine is built, so that damage is found before minutes are spent.
    choice = choose(resume, run_dir, run, plan.recipe, storage)
    engine = build_engine(plan, render(plan), device)
    prepared = with_references(engine, plan, prepared)
    if choice is None:
        state = begin(plan, prepared.key)
    else:
        state = restore(choice.folder, choice.manifests, storage, engine, plan, prepared.key)
        go_on_from(choice, run_dir.checkpoints, storage)
    steps, warn = plan.recipe.train.steps, _warn if rank.is_main else _ignore
    console = Console(quiet=not rank.is_main, force_terminal=False, force_jupyter=False)
    return loop.Run(
        recipe=plan.recipe,
        engine=engine,
        data=BatchLoader.of(plan, prepared, dp_rank=engine.data_parallel_rank),
        saver=Saver(run_dir.checkpoints, plan, engine, run, storage, warn),
        state=state,
        stop_step=steps,
        progress=TrainingProgress(console, steps, state.step, plan.recipe.evaluation.metrics),
        stop=stop.agreement(),
        metrics=MetricsLogger(run_dir, plan, state.step, warn) if rank.is_main else None,
        skipped=engine.guard.read().total,
        profiler=StepProfiler(run_dir, rank.rank, plan.recipe.profile, state.step, warn),
        expert_load=expert_load_of(engine, plan),
        callbacks=Callbacks(plan.recipe, run_dir.path, warn, engine.model),
    )


def _warn(text: str) -> None:
    say(f"warning: {text}")


def _ignore(text: str) -> None:
    """Does nothing: rank 0 prints the same warning."""


def end_on_error(rank: Rank) -> None:
    """Makes an error of the program end this process at once, with the exit code of `llmtrain train`.

    A process group cannot be torn down while other ranks wait in a collective. A user's error has no traceback.
    """
    shown = sys.excepthook

    def ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = error.exit_code if isinstance(error, UserError) else Exit.WORKER
        if isinstance(error, KeyboardInterrupt):
            code = Exit.INTERRUPTED
        elif isinstance(error, UserError):
            which = "" if rank.is_main else f"rank {rank.rank}: "
            say(f"{which}{error.report()}")
        else:
            shown(kind, error, trace)
        leave(code)

    sys.excepthook = ended


def _unread(recipe: Recipe) -> Iterator[str]:
    """Yields a line if the recipe sets what only `llmtrain train` reads."""
    given = recipe.dotted(exclude_defaults=True)
    if fields := [name for name in UNREAD if any(f"{field}.".startswith(f"{name}.") for field in given)]:
        yield f"note: the loop decides when to evaluate, save, sample and export; not read: {', '.join(fields)}"
