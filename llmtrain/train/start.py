"""The start of a job on this machine, and the checks that are made before workers start on any machine.

Whether a model family can be split into stages is only known by trying. That check therefore loads torch and compares
a split tiny copy with an unsplit one.

Modules that take long to import are imported where they are used, because the workers' process is started first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.errors import Exit, RecipeError
from llmtrain.recipe.cluster import Cluster, local_cluster, self_test_folder
from llmtrain.system.host import stop_spinning_on_busy_cores
from llmtrain.system.stops import say
from llmtrain.system.streams import plain_console, print_as_is, quiet_libraries

if TYPE_CHECKING:
    from rich.console import Console

    from llmtrain.launch.fork_server import ForkServer
    from llmtrain.launch.tools import Tool
    from llmtrain.plan import Plan
    from llmtrain.plan.search.enumerate import NamedPlan, RefusedPlan
    from llmtrain.recipe import Recipe
    from llmtrain.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class LocalStart:
    """The start of a job on this machine, with one worker per device."""

    load: Callable[[], tuple[Recipe, RunDir]]
    """Returns the recipe and the run directory."""
    nproc: int | None
    resume: str
    max_steps: int | None
    max_restarts: int
    tool: Tool | None = None
    """The program that starts the workers, or None if this process does."""
    ended: Callable[[int], object] | None = None
    """Called with the exit code, before the usual signal handlers are restored."""

    def train(self) -> int:
        """Trains and returns the exit code."""
        from llmtrain.launch.fork_server import ForkServer
        from llmtrain.launch.jobs.accelerate import requested_processes
        from llmtrain.launch.local import common_environment

        cluster = local_cluster(self.nproc or requested_processes())
        offer_self_test(cluster)
        if cluster.spec.on_cpu:
            configure_thread_waiting(cluster.devices_per_node)
        with ForkServer() as fork_server:
            forked_from = fork_server if cluster.spec.on_cpu and not self.tool else None
            if forked_from:
                # The imports take longest, so they run while the recipe is checked and the data are prepared.
                forked_from.start(common_environment(cluster.world_size))
            from llmtrain.launch.disks import check_disks

            declared, folder = self.load()
            plan = startable(declared, cluster, folder, self.resume, None)
            check_disks(plan)
            return self._launch(plan, folder, forked_from)

    def _launch(self, plan: Plan, folder: RunDir, fork_server: ForkServer | None) -> int:
        """Checks the pipeline's stages, prepares the data, and runs the workers."""
        from llmtrain.checkpoint.before import check_data, check_resume, nothing_left
        from llmtrain.data import BatchLoader, Progress, encode_prompts, prepare, report, with_max_steps
        from llmtrain.launch.local import common_environment
        from llmtrain.launch.tools import check_tool
        from llmtrain.plan.ds_config import render
        from llmtrain.run_dir.lock import RunLock
        from llmtrain.system.stops import caught_signals

        console = plain_console()
        if self.tool:
            check_tool(self.tool, plan)
        print_plan(plan, console)
        if self.resume == "auto" and (reason := nothing_left(plan, folder, self.max_steps)):
            print_as_is(console, [reason])
            return Exit.DONE
        with RunLock.take(folder.path, say) as lock:
            checkpoint = check_resume(plan, folder, self.resume, is_local=True)
            if fork_server:  # restarted if a single worker drives all devices
                fork_server.start(common_environment(plan.workers))
            check_stages(plan)
            check_pretrained(plan.recipe)
            prepared = prepare(plan.recipe, Progress(console))
            plan = with_max_steps(plan, prepared)
            console.print(report(prepared, plan.recipe))
            if plan.recipe.train.epochs and (reason := nothing_left(plan, folder, self.max_steps)):
                print_as_is(console, [reason])
                return Exit.DONE
            if checkpoint:
                check_data(checkpoint, prepared.key, plan.recipe)
            # Refused before anything is written or started: data shorter than a batch, prompts without room.
            BatchLoader.of(plan, prepared, dp_rank=0)
            encode_prompts(plan.recipe, prepared)
            folder.create(plan, render(plan))
            print_as_is(console, [f"run directory {folder.path}"])
            with caught_signals():
                # Batch systems repeat signals. One that arrives after the end must not change the exit code.
                code = self._run(plan, folder, fork_server, console)
                lock.release()
                if self.ended:
                    self.ended(code)
                return code

    def _run(self, plan: Plan, folder: RunDir, fork_server: ForkServer | None, console: Console) -> int:
        """Runs the workers and returns the exit code."""
        from llmtrain.launch.tools import run_by_tool
        from llmtrain.train.restart import train_with_restarts

        arguments = [f"--run-dir={folder.path}", *(["--max-steps", str(self.max_steps)] if self.max_steps else [])]
        if self.tool:
            console.print(f"starting workers with {self.tool}")
            return run_by_tool(self.tool, plan, folder, [*arguments, "--resume", self.resume])
        command = [sys.executable, "-m", "llmtrain.train.worker", *arguments]
        code = train_with_restarts(
            command,
            plan.workers,
            folder,
            resume=self.resume,
            max_restarts=self.max_restarts,
            console=console,
            fork_server=fork_server,
        )
        if fork_server:
            fork_server.close()
        return code


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints model, layout, memory, predicted time and notes, by default to standard error."""
    from llmtrain.plan.predict import memory_of
    from llmtrain.plan.predict.time import describe, predict

    print_as_is(console or plain_console(stderr=True), describe(plan, memory_of(plan), predict(plan)))


def runnable_plan(recipe: Recipe, cluster: Cluster, workers: int | None = None) -> Plan:
    """Returns the plan of a recipe that can be started here. workers: as for `check_runnable`.

    Raises RecipeError with all faults and the nearest legal plans.
    """
    from llmtrain.plan.installed import check_runnable
    from llmtrain.plan.rules import resolve
    from llmtrain.plan.search.cheapest import suggesting

    with suggesting(recipe, cluster):
        plan = resolve(recipe, cluster)
        check_runnable(plan, workers)
    return plan


def startable(declared: Recipe, cluster: Cluster, folder: RunDir, resume: str, workers: int | None) -> Plan:
    """Returns the resolved plan after every check that needs no worker.

    workers: the number of workers that a launcher started; None without a launcher.
    """
    from llmtrain.checkpoint.before import check_choice
    from llmtrain.train.metrics.trackers import check_trackers
    from llmtrain.train.tasks import check_harness

    plan = runnable_plan(declared, cluster, workers)
    check_trackers(declared)
    if declared.tasks.names:
        check_harness()
    folder.check(declared)
    check_choice(folder, resume)
    return plan


def check_stages(plan: Plan) -> None:
    """Tries the plan's adapters and pipeline stages on tiny copies of the model. Loads torch.

    Raises RecipeError if one of them fails.
    """
    if plan.recipe.model.is_partly_frozen:
        with quiet_libraries():
            from llmtrain.models import check_trained

            check_trained(plan.recipe)
    if not plan.stages:
        return
    from llmtrain.models import find_cut_and_split
    from llmtrain.plan.search.cheapest import suggesting

    text = f"comparing a tiny copy of the model in {plan.parallel.stages} stages with the whole model"
    with suggesting(plan.recipe, plan.cluster, {"parallel.pipeline": 1}), plain_console(stderr=True).status(text):
        find_cut_and_split(plan.recipe, plan.parallel.stages, plan.parallel.tensor)


def check_pretrained(recipe: Recipe) -> None:
    """Checks the pretrained model of a recipe before the data are prepared. Loads torch.

    Raises RecipeError if the weights are not those of the model, or if its own code does not keep documents apart.
    """
    if recipe.model.pretrained is not None:
        with quiet_libraries():
            from llmtrain.models import check_weights
            from llmtrain.models.tiny.documents_check import check_documents

            check_weights(recipe)
            note = check_documents(recipe)
        if note:
            say(f"note: {note}")


def without_unsplittable(
    plans: Sequence[NamedPlan], refused: Sequence[RefusedPlan]
) -> tuple[list[NamedPlan], list[RefusedPlan]]:
    """Returns both lists, with pipelines whose model cannot be split into their stages moved to the refused plans.

    Raises RecipeError if no plan is left.
    """
    from llmtrain.plan.search.enumerate import RefusedPlan

    faults: dict[tuple[int, int], RecipeError | None] = {}
    kept, out = [], list(refused)
    for candidate in plans:
        stages = (candidate.plan.parallel.stages, candidate.plan.parallel.tensor)
        if stages not in faults:
            try:
                check_stages(candidate.plan)
                faults[stages] = None
            except RecipeError as error:
                faults[stages] = error
        fault = faults[stages]
        if fault is None:
            kept.append(candidate)
        else:
            out.append(RefusedPlan(candidate.name, fault.problems[0]))
    if plans and not kept:
        raise RecipeError(dict.fromkeys(fault.problems[0] for fault in faults.values() if fault))
    return kept, out


def offer_self_test(cluster: Cluster) -> None:
    """Suggests the self-test on a machine with untested GPUs, once per type of device."""
    offered = self_test_folder() / f"offered_{cluster.device}"
    if cluster.spec.on_cpu or cluster.measured or offered.exists():
        return
    say("these GPUs have not been tested with llmtrain; `llmtrain doctor --self-test` takes a minute (shown once)")
    with suppress(OSError):
        offered.parent.mkdir(parents=True, exist_ok=True)
        offered.touch()


def configure_thread_waiting(ranks: int) -> None:
    """Chooses how the threads of this host's ranks wait for each other. Called before torch is loaded."""
    if line := stop_spinning_on_busy_cores(os.environ, ranks):
        print(line, flush=True)
