"""A worker: one rank of a run, whichever launcher started it.

Our own launcher starts `python -m llmtrain.train.worker --run-dir=DIR`; a recipe file started by torchrun, deepspeed or
accelerate reaches `train_rank` through the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.errors import Exit, RecipeError, reason
from llmtrain.launch import Rank, discover
from llmtrain.launch.authentication import Secret
from llmtrain.launch.discovery.interfaces import set_interfaces
from llmtrain.plan import Plan
from llmtrain.plan.described import chosen_line, kernel_choice_lines
from llmtrain.run_dir import RunDir, write_json
from llmtrain.run_dir.lock import RunLock
from llmtrain.system.heartbeat import Heartbeat, Phase
from llmtrain.system.host import bound_pinned_memory, limit_spinning
from llmtrain.system.kernel_caches import use_kernel_caches
from llmtrain.system.stops import after_step, ignore_signals, leave
from llmtrain.system.streams import print_as_is
from llmtrain.train import watchdog
from llmtrain.train.console import WorkerOutput, redirect_output
from llmtrain.train.metrics.expert_load import expert_load_of
from llmtrain.train.metrics.logger import EventName, note_event
from llmtrain.train.signals import StopSignals

if TYPE_CHECKING:
    import torch

    from llmtrain.checkpoint.contents import TrainerState
    from llmtrain.checkpoint.resume import ResumeChoice
    from llmtrain.checkpoint.save import Saver
    from llmtrain.checkpoint.storage import Storage
    from llmtrain.data import BatchLoader, Prepared
    from llmtrain.engines import Engine
    from llmtrain.train.callbacks import Callbacks
    from llmtrain.train.loop import ProgressOutputs


def main(
    run_dir: Annotated[Path, typer.Option()],
    resume: str = "auto",
    max_steps: Annotated[int | None, typer.Option()] = None,
) -> None:
    """Trains as one rank of the run that a launcher has written to a folder."""
    signals = StopSignals()
    limit_spinning(os.environ)
    rank = discover(os.environ, sys.argv)
    if rank is None:
        raise SystemExit("llmtrain.train.worker is started by a launcher, which sets RANK; use `llmtrain train`")
    folder = RunDir(run_dir)
    plan, ds_config = folder.read_plan(), folder.read_ds_config()
    train_rank(rank, folder, plan, ds_config, resume=resume, max_steps=max_steps, signals=signals)


def train_rank(
    rank: Rank,
    run_dir: RunDir,
    plan: Plan,
    ds_config: dict[str, object],
    *,
    resume: str,
    signals: StopSignals,
    max_steps: int | None = None,
    lock: RunLock | None = None,
) -> None:
    """Trains as `rank`. Exits with the code of its failure, or 75 if a signal stopped it; returns otherwise.

    resume: `auto`, `never` or a checkpoint folder. max_steps: the step to stop after. signals: those received so far.
    lock: of the run directory, if this process holds it; released at the end.
    """
    if not plan.cluster.spec.on_cpu:
        bound_pinned_memory(os.environ)
    output = redirect_output(run_dir, rank)
    _set_interfaces(rank, run_dir, plan)
    heartbeat = Heartbeat.of_worker(rank.local_rank)
    secret = Secret.of_worker()
    watcher = watchdog.start(rank, run_dir, plan, heartbeat, secret.authenticator, output.stderr)
    try:
        use_kernel_caches(os.environ)
        code = _Worker(rank, run_dir, plan, signals, output, heartbeat, watcher, secret).train(
            ds_config, resume, max_steps
        )
    except BaseException as error:
        failed = output.report_failure(error)
        if rank.launcher != "local" and failed != Exit.INTERRUPTED:  # llmtrain's own launcher records deaths itself
            note_event(run_dir, "died", heartbeat.page.step, f"rank {rank.rank}: {reason(error)}")
        watcher.stop()
        if lock:
            lock.release()
        # Not sys.exit: a process group cannot be torn down while other ranks wait in a collective.
        os._exit(failed)
    watcher.stop()
    if lock:
        lock.release()
    if code != Exit.DONE:
        leave(code)
    ignore_signals()


def _set_interfaces(rank: Rank, run_dir: RunDir, plan: Plan) -> None:
    """Makes gloo and NCCL use a network that other hosts can reach. Logs the choice; rank 0 also records it."""
    choice = set_interfaces(rank, plan.cluster.spec.on_cpu)
    for line in choice.lines:
        print(f"network interface of {line}", flush=True)
    if choice.variables and rank.is_main:
        run_dir.write_environment()


@dataclass(frozen=True)
class _Worker:
    """A rank's worker before torch is loaded."""

    rank: Rank
    run_dir: RunDir
    plan: Plan
    signals: StopSignals
    output: WorkerOutput
    heartbeat: Heartbeat
    watcher: watchdog.WatcherHandle
    secret: Secret

    def train(self, ds_config: dict[str, object], resume: str, max_steps: int | None) -> Exit:
        """Runs the whole life of a worker."""
        from llmtrain.data import Progress, encode_prompts, prepare, with_max_steps

        prepared = prepare(self.plan.recipe, Progress(self.output.console))
        prompts = encode_prompts(self.plan.recipe, prepared)  # forks, which is safe only before torch is loaded
        with self.output.console.status("starting torch and DeepSpeed") as status:
            from llmtrain.engines.runtime.agree import check_same_code
            from llmtrain.engines.runtime.distributed import agreed_secret, init_process_group, store
            from llmtrain.train.tune.request import with_kernels

            device = init_process_group(self.rank, self.plan.cluster.spec.on_cpu)
            check_same_code(self.plan)
            secret = agreed_secret(self.secret, self.rank)
            self.watcher.exchange_address(store("watcher"), secret.authenticator)
            plan = with_kernels(with_max_steps(self.plan, prepared), device, self.rank, status.update)
            worker = replace(self, secret=secret, plan=plan)
        worker._note_kernels()
        return worker._train(prepared, prompts, device, ds_config, resume, max_steps)

    def _train(
        self,
        prepared: Prepared,
        prompts: list[list[int]],
        device: torch.device,
        ds_config: dict[str, object],
        resume: str,
        max_steps: int | None,
    ) -> Exit:
        """Runs the rest of the worker's life, after the rendezvous and once the plan's kernels are known."""
        from torch import distributed as dist

        from llmtrain.checkpoint.manifest import already_taken
        from llmtrain.checkpoint.save import Saver
        from llmtrain.checkpoint.storage import probe
        from llmtrain.data import BatchLoader
        from llmtrain.data.preview import first_batch_html
        from llmtrain.engines import build_engine
        from llmtrain.engines.own_time import measure_own_time
        from llmtrain.engines.reference_model import with_references
        from llmtrain.engines.runtime.devices import free_device_memory
        from llmtrain.overrides import untried_versions
        from llmtrain.train.callbacks import Callbacks

        plan, run_dir = self.plan, self.run_dir
        with self.output.console.status("starting torch and DeepSpeed") as status:
            storage = probe(run_dir.checkpoints)
            # A checkpoint is verified before the engine is built, so that damage is found before minutes are spent.
            choice = self._choose(resume, storage)
            if choice and (nothing_left := already_taken(run_dir.path, choice.manifests[0].step, max_steps)):
                self._say(nothing_left)
                dist.destroy_process_group()
                self.heartbeat.done()
                return Exit.DONE
            for line in untried_versions():
                self.output.warn(line)
            engine = build_engine(plan, ds_config, device)
            measure_own_time(plan, engine, self.heartbeat)
            if plan.recipe.objective.needs_reference:
                status.update("reading or computing the reference's log-probabilities")
                with self.heartbeat.phase(Phase.EVALUATING):
                    prepared = with_references(engine, plan, prepared, self.heartbeat.beat)
            state = self._start(engine, choice, prepared.key, storage)
            self._note_history(state)
        data = BatchLoader.of(plan, prepared, dp_rank=engine.data_parallel_rank)
        if self.rank.is_main:
            template = prepared.chat_template
            source = template.source if template else None
            run_dir.keep_tokenizer(prepared.tokenizer_dir, source, prepared.stop_ids)
            if template and not state.step:
                run_dir.write_first_batch(first_batch_html(prepared, plan.recipe))
            print(f"engine: {engine.describe()}")
        stop_step = min(max_steps or plan.recipe.train.steps, plan.recipe.train.steps)
        saver = Saver(run_dir.checkpoints, plan, engine, self._run_id(), storage, self.output.warn)
        callbacks = Callbacks(plan.recipe, run_dir.path, self.output.warn, engine.model)
        self._note_event("started", state.step, f"workers: {plan.workers}, launcher: {self.rank.launcher}")
        outputs = self._progress_outputs(prepared, prompts, state)
        stopped = self._fit(
            partial(self._attempt, engine, data, saver, state, stop_step, outputs, callbacks), engine, saver, state
        )
        engine.close()
        dist.destroy_process_group()
        self.heartbeat.done()
        if stopped:
            if outputs.scoring:
                outputs.scoring.cancel()
            self._report()
            return Exit.RESUME
        self._note_end(state)
        if self.rank.is_main:
            self.signals.exit_on_signal(state.step, self.output.stderr)
            from llmtrain.train.finish import finish

            del engine, data, saver  # the sample is generated on the same GPU
            free_device_memory()

            finish(run_dir, plan, state, prepared, outputs.scoring, self.output.console)
            self._report()
        return Exit.DONE

    def _note_end(self, state: TrainerState) -> None:
        """Records that the run has finished, or stopped before its last step."""
        if state.ended or state.step == self.plan.recipe.train.steps:
            self._note_event("finished", state.step, state.ended)
        else:
            self._note_event("stopped", state.step, "by --max-steps")
        if state.ended:
            self._say(f"ended after step {state.step:,}: {state.ended}")

    def _progress_outputs(self, prepared: Prepared, prompts: list[list[int]], state: TrainerState) -> ProgressOutputs:
        """Returns the outputs that show the model's progress. prompts: token ids of texts to continue."""
        from llmtrain.train.loop import ProgressOutputs
        from llmtrain.train.sampling import Sampler
        from llmtrain.train.tasks import BackgroundScoring

        recipe = self.plan.recipe
        scores = self.rank.is_main and recipe.tasks.every_steps
        return ProgressOutputs(
            Sampler(self.plan, prepared, prompts) if prompts else None,
            BackgroundScoring(self.run_dir, recipe.tasks.every_steps, state.step) if scores else None,
        )

    def _note_kernels(self) -> None:
        """Writes the kernels to the run directory, and prints them if they were measured."""
        if self.plan.kernels is None or not self.rank.is_main:
            return
        self.run_dir.write_plan(self.run_dir.read_plan().model_copy(update={"kernels": self.plan.kernels}))
        print(*kernel_choice_lines(self.plan.kernels), sep="\n", flush=True)
        if self.plan.kernels.milliseconds:
            self._say(chosen_line(self.plan.kernels))

    def _fit(self, attempt: Callable[[], bool], engine: Engine, saver: Saver, state: TrainerState) -> bool:
        """Trains, and rolls back to a checkpoint as often as the guard allows. Returns whether a signal stopped it."""
        from llmtrain.train.loop import TooManySkippedError
        from llmtrain.train.rollback import SkippedUpdates, roll_back

        while True:
            try:
                return attempt()
            except TooManySkippedError as error:
                with self.heartbeat.phase(Phase.LOADING):
                    saver.settle()
                    skipped_updates = SkippedUpdates(self.plan, state, error.skipped)
                    why = skipped_updates.describe()
                    roll_back(skipped_updates, engine, saver.checkpoints, saver.run, saver.storage)
                self._note_history(state)
                self._note_event("rolled_back", state.step, why)
                self._say(
                    f"too many updates skipped: rolled back to step {state.step:,}, "
                    f"the data continue with sample {state.samples:,}"
                )

    def _attempt(
        self,
        engine: Engine,
        data: BatchLoader,
        saver: Saver,
        state: TrainerState,
        stop_step: int,
        outputs: ProgressOutputs,
        callbacks: Callbacks,
    ) -> bool:
        """Trains until the end, or a signal; returns whether a signal stopped it. Raises TooManySkippedError."""
        import torch

        from llmtrain.engines.runtime.distributed import barrier
        from llmtrain.train.loop import Run, fit
        from llmtrain.train.metrics import BusyCores, MetricsLogger, TrainingProgress
        from llmtrain.train.profiling import StepProfiler
        from llmtrain.train.signals import StopAgreement

        if state.step:
            self._say(f"continuing after step {state.step:,}")
            self._print_changes(state)
        recipe, heartbeat = self.plan.recipe, self.heartbeat
        shows_cores = self.rank.is_main and self.plan.cluster.spec.on_cpu
        metrics = None
        if self.rank.is_main:
            metrics = MetricsLogger(self.run_dir, self.plan, state.step, self.output.warn, stop_step)
        try:
            own = recipe.evaluation.metrics
            with TrainingProgress(self.output.console, stop_step, state.step, own) as progress:
                stop = StopAgreement(self.signals, self.secret.authenticator, attempt=state.rollbacks)
                profiler = StepProfiler(self.run_dir, self.rank.rank, recipe.profile, state.step, self.output.warn)
                run = Run(
                    recipe=recipe,
                    engine=engine,
                    data=data,
                    saver=saver,
                    state=state,
                    stop_step=stop_step,
                    progress=progress,
                    stop=stop,
                    metrics=metrics,
                    skipped=engine.guard.read().total,
                    heartbeat=heartbeat,
                    cores=BusyCores(self.rank.local_world_size, torch.get_num_threads()) if shows_cores else None,
                    profiler=profiler,
                    expert_load=expert_load_of(engine, self.plan),
                    callbacks=callbacks,
                    outputs=outputs,
                )
                fit(run)
                profiler.close()
                stop.close()
                heartbeat.finish()
                progress.summary()
        finally:
            if metrics:
                metrics.close()
        if stop.stopped_by is None:
            return False
        barrier()  # rank 0 keeps the store from which the others have just read a verdict
        self._say(after_step(stop.stopped_by, state.step))
        self._note_event("stopped", state.step, f"on {stop.stopped_by.name}")
        return True

    def _choose(self, resume: str, storage: Storage) -> ResumeChoice | None:
        """Returns the verified checkpoint to continue from, or None for a new run. Warns about damaged newer ones."""
        from llmtrain.checkpoint.resume import choose

        with self.output.console.status("checking checkpoints"):
            choice = choose(resume, self.run_dir, self._run_id(), self.plan.recipe, storage)
        if choice:
            for problem in choice.rejected:
                self.output.warn(str(problem))
            if choice.rejected:
                self._say(f"falling back to {choice.folder.name}")
        return choice

    def _start(self, engine: Engine, choice: ResumeChoice | None, data: str, storage: Storage) -> TrainerState:
        """Returns the state to start from."""
        from llmtrain.checkpoint.resume import go_on_from
        from llmtrain.checkpoint.state import begin, restore

        if choice is None:
            return begin(self.plan, data)
        state = restore(choice.folder, choice.manifests, storage, engine, self.plan, data)
        go_on_from(choice, self.run_dir.checkpoints, storage)
        return state

    def _note_event(self, event: EventName, step: int, text: str) -> None:
        if self.rank.is_main:
            note_event(self.run_dir, event, step, text)

    def _report(self) -> None:
        from llmtrain.report.page import write_report_at_end

        if self.rank.is_main:
            write_report_at_end(self.run_dir, self.output.warn)

    def _note_history(self, state: TrainerState) -> None:
        """Writes the history to the run directory, for people; a resume reads it from the checkpoint."""
        if not self.rank.is_main:
            return
        try:
            write_json(self.run_dir.history_file, [asdict(entry) for entry in state.history])
        except RecipeError as error:
            self.output.warn(str(error))

    def _print_changes(self, state: TrainerState) -> None:
        """Prints what has changed since the start of the run, and the effect on the learning rate."""
        from llmtrain.checkpoint.contents import changed_values
        from llmtrain.engines.optim import rate_of

        first, step, recipe = state.history[0].values, state.step + 1, self.plan.recipe
        if changed := changed_values(first, state.history[-1].values):
            self._say(f"changed since the start: {', '.join(changed)}")
        steps = "train.max_steps"
        now, before = rate_of(recipe, step), rate_of(recipe.with_(**{steps: first[steps]}), step)
        if now != before:
            self._say(f"learning rate of step {step:,}: {now:.2e} instead of {before:.2e} with {steps}={first[steps]}")

    def _run_id(self) -> str:
        """Returns the run's id; its file may only be on rank 0's node."""
        from llmtrain.engines.runtime.agree import broadcast

        return broadcast(self.run_dir.read_id() if self.rank.is_main else "")

    def _say(self, line: str) -> None:
        print_as_is(self.output.console, [line])


if __name__ == "__main__":
    typer.run(main)
