"""The training loop, which is independent of how the work is divided among ranks."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import step_of
from llmtrain.checkpoint.save import Saver
from llmtrain.data import MAIN_SET, BatchLoader, StepBatch
from llmtrain.engines import Engine, StepResult
from llmtrain.engines.divergence import estimate_divergence
from llmtrain.engines.guard import Skipped
from llmtrain.engines.runtime.agree import all_reduce_sum, broadcast
from llmtrain.models import OwnLoss
from llmtrain.recipe import Recipe
from llmtrain.system.heartbeat import Heartbeat, Phase
from llmtrain.train.callbacks import Callbacks, Requests
from llmtrain.train.early_stopping import check_metrics, reason_to_stop
from llmtrain.train.metrics import (
    BusyCores,
    Evaluation,
    Meter,
    MetricsLogger,
    Record,
    StepMetrics,
    TrainingProgress,
    metrics_of,
)
from llmtrain.train.metrics.expert_load import ExpertLoad
from llmtrain.train.profiling import StepProfiler
from llmtrain.train.sampling import Sampler
from llmtrain.train.signals import StopAgreement
from llmtrain.train.tasks import BackgroundScoring, ScoringError, scores


@dataclass(frozen=True)
class ProgressOutputs:
    """What a run produces to show the model's progress, in addition to the loss."""

    sampler: Sampler | None = None
    """Set if the recipe asks for samples."""
    scoring: BackgroundScoring | None = None
    """Set on rank 0 if checkpoints are scored during training."""


@dataclass
class Run:
    """The state and the parts of a training run on one rank."""

    recipe: Recipe
    engine: Engine
    data: BatchLoader
    saver: Saver
    state: TrainerState
    stop_step: int
    """Step after which the run stops; below `train.max_steps` if the user asked for that."""
    progress: TrainingProgress
    stop: StopAgreement
    metrics: MetricsLogger | None
    """Set on rank 0 only."""
    skipped: int = 0
    """Number of skipped updates that have been reported."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    cores: BusyCores | None = None
    """Set on rank 0 if it computes on a CPU."""
    profiler: StepProfiler | None = None
    expert_load: ExpertLoad | None = None
    """Set on all ranks for a mixture of experts."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    outputs: ProgressOutputs = ProgressOutputs()
    meter: Meter = field(default_factory=Meter)
    """Counts the steps since the last logged one."""

    @property
    def at_end(self) -> bool:
        """Whether the run has ended; not after `stop_step`, since a run that stops early must not log more often."""
        return self.state.step == self.recipe.train.steps or bool(self.state.ended)

    @property
    def goes_on(self) -> bool:
        """Whether to take another step. Each rank asks once after each step."""
        return self.state.step < self.stop_step and not self.state.ended and not self.stop.should_stop(self.state.step)


class TooManySkippedError(Exception):
    """The guard has skipped more updates than the recipe allows; raised on all ranks after the same step."""

    def __init__(self, skipped: Skipped) -> None:
        super().__init__(f"{len(skipped.recent)} updates skipped")
        self.skipped = skipped


def fit(run: Run) -> None:
    """Trains from `run.state` to `run.stop_step`, or until a signal; evaluates, logs and saves as the recipe says.

    It also does so, and ends, as callbacks ask. The final state is saved. Raises TooManySkippedError, without saving,
    after a step at which the guard's recent skips are checked (`guard.every_steps`).
    """
    recipe, state = run.recipe, run.state
    if state.ended:
        return
    begin(run)
    if state.step == 0 and recipe.evaluates_at_start:
        evaluate(run)
    run.meter = Meter()
    saved = state.step
    with closing(run.data.train_batches(state.samples)) as batches:
        while run.goes_on:
            batch, waited = begin_step(run, batches)
            result = run.engine.train_step(batch, run.callbacks.gradient_hook(state.step + 1))
            asked = end_step(run, result, batch, waited)
            with run.meter.paused():
                every = recipe.evaluation.every_steps
                if asked.evaluate or (every and (run.at_end or _due(every, state.step))):
                    asked = replace(asked, save=asked.save | evaluate(run).save)
                if run.outputs.sampler and (run.at_end or _due(recipe.samples.every_steps, state.step)):
                    sample(run, run.outputs.sampler)
            if asked.save or _due(recipe.checkpoint.every_steps, state.step):
                save(run)
                saved = state.step
            with run.meter.paused():
                _announce_save(run)
    if saved != state.step:
        save(run)
    finish(run)


def begin(run: Run) -> None:
    """Loads and calls the callbacks before the first step of this process."""
    run.callbacks.load(run.state.callbacks)
    run.callbacks.add(_call(run, "on_train_begin").metrics)


def finish(run: Run) -> None:
    """Waits for the last save, and calls the callbacks after the last step of this process."""
    finish_save(run)
    _call(run, "on_train_end")


def begin_step(run: Run, batches: Iterator[StepBatch]) -> tuple[StepBatch, float]:
    """Returns the next batch, and the seconds that this rank has waited for it."""
    run.heartbeat.begin_step(run.state.step + 1)
    started = time.perf_counter()
    batch = next(batches)
    waited = time.perf_counter() - started
    if run.profiler:
        run.profiler.begin(run.state.step + 1)
    return batch, waited


def end_step(run: Run, result: StepResult, batch: StepBatch, waited: float) -> Requests:
    """Counts a step, calls the callbacks, and logs the step if it is due; returns what the callbacks ask for.

    waited: seconds spent waiting for the batch. Raises TooManySkippedError.
    """
    state, recipe = run.state, run.recipe
    run.heartbeat.end_step(waited)
    state.step += 1
    state.samples += batch.samples
    state.tokens += batch.target_tokens
    run.meter.add(batch.target_tokens, waited)
    run.progress.advance(state.step)
    if run.profiler:
        run.profiler.end(state.step)
    is_logged = run.at_end or _due(recipe.logging.every_steps, state.step)
    record = _record(run, result, batch) if is_logged else None
    with run.meter.paused():
        if is_logged:
            run.callbacks.check_gradients(state.step)
        asked = _call(run, "on_step_end", record, is_logged)
    run.callbacks.add(asked.metrics)
    if asked.stop and record is None:
        record = _record(run, result, batch)
    if record is not None and run.metrics:
        _log(run, run.metrics, record)
    if is_logged and run.profiler:
        run.profiler.check_request(state.step)
    # Separate from logging, because results must not depend on what is logged.
    if run.at_end or recipe.guard.looks_after(state.step):
        _check_skipped(run)
    return asked


def _call(
    run: Run, hook: str, record: Record | None = None, is_logged: bool = False, checkpoint: Path | None = None
) -> Requests:
    """Calls the callbacks, and ends the run if they ask for it."""
    with run.heartbeat.phase(Phase.CALLBACKS) if hook in run.callbacks.hooks else nullcontext():
        step = step_of(checkpoint.name) if checkpoint else run.state.step
        asked = run.callbacks.call(hook, step, record, is_logged, checkpoint)
    run.state.ended = run.state.ended or asked.stop
    return asked


def _announce_save(run: Run) -> None:
    """Tells the callbacks of a checkpoint that is complete on all ranks."""
    if not run.callbacks.awaits_save or not run.callbacks.all_ranks(not run.saver.is_writing):
        return
    run.callbacks.awaits_save = False
    if run.saver.written:
        _call(run, "on_save", checkpoint=run.saver.written)


def evaluate(run: Run) -> Requests:
    """Computes and logs the mean loss over the items of each evaluation set; returns what callbacks ask for."""
    with run.progress.busy("evaluating"), run.heartbeat.phase(Phase.EVALUATING), run.engine.averaged():
        evaluations = {name: _evaluated(run, name) for name in run.data.eval_sets}
    main = evaluations.pop(MAIN_SET)
    run.state.eval_loss, run.state.eval_step = main.loss, run.state.step
    record = run.metrics.eval_record(run.state.step, main, evaluations) if run.metrics else None
    asked = _call(run, "on_evaluate", record, is_logged=True)
    if record is not None and run.metrics:
        record |= asked.metrics
        run.metrics.log(record)
        run.progress.show(record)
    _judge(run, metrics_of(record or {}))
    return asked


def _judge(run: Run, metrics: dict[str, float | None]) -> None:
    """Tells all ranks the metrics of an evaluation, and ends the run if these do not improve any more."""
    state, stopping = run.state, run.recipe.train.early_stopping
    state.eval_metrics = broadcast(metrics)
    check_metrics(run.recipe, state)
    if stopping:
        state.ended = state.ended or reason_to_stop(stopping, state)


def _evaluated(run: Run, name: str) -> Evaluation:
    """Computes the mean loss over the items of a set, of all its sources and of each."""
    losses: dict[str, float] = defaultdict(float)
    num_items: dict[str, int] = defaultdict(int)
    sums: Tensor | None = None
    own, own_sums = run.engine.own_metrics, torch.zeros((), dtype=torch.float64)
    max_items = run.recipe.evaluation.max_sequences
    if run.engine.objective and run.engine.objective.needs_divergence:
        estimate_divergence(run.engine, run.data.eval_batches(max_items, name), run.heartbeat.beat)
    for batch in run.data.eval_batches(max_items, name):
        run.heartbeat.beat()
        losses[batch.eval_source] += run.engine.eval_step(batch).item() * batch.num_items
        num_items[batch.eval_source] += batch.num_items
        if (of_batch := run.engine.metric_sums()) is not None:
            sums = of_batch.double().cpu() if sums is None else sums + of_batch.cpu()
        if own:
            own_sums = own_sums + run.engine.own_metric_sums().cpu()
    total = max(1, sum(num_items.values()))
    known = run.data.eval_bytes(max_items, name) if run.metrics else None
    return Evaluation(
        loss=sum(losses.values()) / total,
        by_source={source: loss / max(1, num_items[source]) for source, loss in losses.items()},
        of_objective=_metrics(run, sums, total),
        bytes_per_token=known / total if known else None,
        own=own.means(own_sums.tolist()) if own else {},
    )


def sample(run: Run, sampler: Sampler) -> None:
    """Continues the prompts of the recipe, and logs the texts."""
    with run.progress.busy("sampling"), run.heartbeat.phase(Phase.EVALUATING), run.engine.averaged():
        samples = sampler.continued(run.engine, run.heartbeat.beat)
    if run.metrics:
        run.metrics.log_samples(run.state.step, samples)
        run.progress.show_samples(run.state.step, samples)


def save(run: Run) -> None:
    """Starts a save. Flushes the metrics first, so that a resumed run lacks no line."""
    with run.meter.saving(), run.progress.busy(_saving(run)), run.heartbeat.phase(Phase.SAVING):
        if run.metrics:
            run.metrics.flush()
        if run.callbacks.awaits_save:
            run.saver.settle()
            _announce_save(run)
        run.state.callbacks = run.callbacks.state(run.state.step)
        run.saver.start(run.state)
        run.callbacks.awaits_save = "on_save" in run.callbacks.hooks


def finish_save(run: Run) -> None:
    """Waits until the last checkpoint is complete."""
    with run.progress.busy(_saving(run)), run.heartbeat.phase(Phase.SAVING):
        run.saver.wait()
    _announce_save(run)


def _saving(run: Run) -> str:
    signal = run.stop.stopped_by
    return f"stopping on {signal.name}: saving" if signal else "saving"


def _metrics(run: Run, sums: Tensor | None, num_items: int) -> dict[str, float] | None:
    """Returns the metrics of the objective. Raises RecipeError if a user's own loss has counted other items."""
    objective = run.engine.objective
    if objective is None or sums is None:
        return None
    if isinstance(objective, OwnLoss):
        objective.check_count(sums.tolist(), num_items)
    return objective.metrics(sums.tolist())


def _due(every_steps: int, step: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def _check_skipped(run: Run) -> None:
    """Raises TooManySkippedError, on all ranks alike."""
    with run.heartbeat.waiting():
        skipped = run.engine.guard.read()
    if len(skipped.recent) > run.recipe.guard.max_skipped:
        raise TooManySkippedError(skipped)


def _record(run: Run, result: StepResult, batch: StepBatch) -> Record | None:
    """Returns the record of a step on rank 0, which waits for the device to read its values; None on other ranks."""
    sums = run.engine.metric_sums()
    router_loss = None if result.router_loss is None else all_reduce_sum(result.router_loss)
    expert_load = run.expert_load.take() if run.expert_load else None
    if run.metrics is None:
        return None
    with run.heartbeat.waiting():
        skipped = run.engine.guard.read()
    if skipped.total > run.skipped:
        new = skipped.total - run.skipped
        run.progress.note(skipped.describe(run.state.step, new))
        for update in skipped.recent[-new:]:
            run.metrics.log_event("skipped", run.state.step - update.steps_ago, update.why())
        run.skipped = skipped.total
    with run.heartbeat.waiting():
        loss, grad_norm = result.loss.item(), result.grad_norm.item()
        means = _metrics(run, sums, batch.num_items)
        of_router = None if router_loss is None else (router_loss[0] / router_loss[1]).item()
    return run.metrics.step_record(
        StepMetrics(
            step=run.state.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=result.lr,
            tokens=run.state.tokens,
            samples=run.state.samples,
            window=run.meter.close(),
            peak_memory_bytes=_peak_memory(),
            skipped_steps=skipped.total,
            rollbacks=run.state.rollbacks,
            slowest=run.heartbeat.slowest(),
            of_objective=means,
            router_loss=of_router,
            expert_load=None if expert_load is None else expert_load.item(),
        )
    )


def _log(run: Run, metrics: MetricsLogger, record: Record) -> None:
    """Logs and shows the record of a step, with the metrics of the callbacks; on rank 0."""
    slow_callbacks = run.callbacks.line()
    record |= {name: value for name, value in run.callbacks.metrics_of_window().items() if name not in record}
    metrics.log(record)
    run.progress.show(record)
    if slow_callbacks:
        run.progress.note(slow_callbacks)
    if run.outputs.scoring:
        _log_scores(run, metrics, run.outputs.scoring)
    if slow := run.heartbeat.straggler():
        run.progress.note(f"rank {slow[0]} is slow: it takes {slow[1]:.1f} times as long as the median rank")
    if run.cores and (busy := run.cores.line()):
        run.progress.note(busy)


def _log_scores(run: Run, metrics: MetricsLogger, scoring: BackgroundScoring) -> None:
    try:
        results = scoring.poll(run.state.step)
    except ScoringError as error:
        run.progress.note(str(error))
        return
    for score in scores(results or {}):
        metrics.log_score(run.state.step, score.task, score.metric, score.value)
        run.progress.note(f"{score.task}  {score.metric} {score.value:.4f}")


def _peak_memory() -> int:
    """Returns the peak memory in bytes: allocated on the GPU or, without a GPU, resident on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
