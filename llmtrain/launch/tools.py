"""Starts workers with torchrun or accelerate, and renders the commands that start a plan on several machines.

Both tools turn every exit code into 1, die of signals that mean "save", and report the last failure first. Therefore
they start workers through `llmtrain.launch.worker_wrapper`, which records what happened.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, Literal

from llmtrain.errors import Exit, Problem, RecipeError, WorkerError
from llmtrain.launch.authentication import Secret
from llmtrain.launch.failure import Failure
from llmtrain.launch.hang_detector import HangDetector
from llmtrain.launch.jobs.accelerate import has_configuration, render_configuration
from llmtrain.launch.local import KILL_SIGNALS, clear_failures, describe_exit, exit_code_before_first_step
from llmtrain.plan.plan import Plan
from llmtrain.run_dir import RunDir
from llmtrain.system.parent import kill_with_parent
from llmtrain.system.stops import QUIT, STOP_SIGNALS, caught_signals

Tool = Literal["torchrun", "accelerate"]
TOOLS: tuple[Tool, ...] = ("torchrun", "accelerate")
PORT = 29500
"""The rendezvous port of a printed command, on the first of its nodes."""
LOOK_S = 0.2
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@dataclass(frozen=True)
class ToolJob:
    """A job for a tool."""

    tool: Tool
    plan: Plan
    run_dir: RunDir
    arguments: tuple[str, ...]
    """Arguments of `llmtrain.train.worker`."""


def check_tool(tool: Tool, plan: Plan) -> None:
    """Raises RecipeError if the tool cannot start the plan."""
    if tool == "accelerate" and not has_configuration(plan):
        strategy = plan.recipe.parallel.strategy
        message = f"has no configuration for parallel.backend={strategy}"
        raise RecipeError(Problem("launch.accelerate", "--launcher accelerate", message, "--launcher torchrun"))


def run_by_tool(job: ToolJob) -> int:
    """Runs the workers of a plan on this machine. Returns and raises as `run_workers` does."""
    clear_failures(job.run_dir)
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as name:
        folder = Path(name)
        command = [*_tool(job), *worker_command(folder), "-m", "llmtrain.train.worker", *job.arguments]
        job.run_dir.write_launch(job.tool, job.plan.workers, command)
        log = job.run_dir.logs / "launcher.log"
        secret, hang_detector = Secret.new().environment, HangDetector(job.plan.recipe.watchdog.min_seconds)
        with caught_signals() as events, log.open("ab") as errors, started(command, errors, secret) as process:
            stopped_by, impatient = wait(process, folder, events, hang_detector)
            if impatient:
                return Exit.INTERRUPTED
            return _outcome(job, folder, process.returncode, stopped_by, hang_detector.stopped)


def _tool(job: ToolJob) -> list[str]:
    if job.tool == "torchrun":
        return [*TORCHRUN, "--standalone", f"--nproc-per-node={job.plan.workers}"]
    configuration = job.run_dir.path / "accelerate.yaml"
    configuration.write_text(render_configuration(job.plan, job.run_dir.ds_config_file.absolute()), encoding="utf-8")
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configuration)]


def worker_command(folder: Path) -> list[str]:
    """Returns the command of each worker, without the arguments of its Python. folder: where it reports its state."""
    return ["-m", "llmtrain.launch.worker_wrapper", str(folder)]


@contextmanager
def started(
    command: list[str], errors: IO[bytes] | None = None, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a tool in a session of its own: a Ctrl-C reaches the workers through us.

    errors: receives the tool's own messages. env: variables that override those of this process.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
        preexec_fn=kill_with_parent(),
    )
    try:
        yield process
    finally:
        process.kill()  # workers end with the tool, by `die_with`
        process.wait()


def wait(
    process: subprocess.Popen[bytes], folder: Path, events: SimpleQueue[Any], hang_detector: HangDetector | None = None
) -> tuple[int | None, bool]:
    """Waits for a tool. Returns the signal that stopped the run, and whether another signal ended the wait.

    events: the numbers of signals, as they arrive. hang_detector: checks the tool and the workers that have begun.
    """
    stopped_by: int | None = None
    signalled: set[str] = set()
    while process.poll() is None:
        with suppress(Empty):
            event: int = events.get(timeout=LOOK_S)
            if event == QUIT:
                return stopped_by, True
            stopped_by = stopped_by or event
        if hang_detector is not None:
            hang_detector.check({"the launcher's process": process.pid, **_running(folder)})
        if stopped_by is not None:
            _signal_workers(folder, stopped_by, signalled)
    return stopped_by, False


def _running(folder: Path) -> dict[str, int]:
    """Returns the process ids of the workers that have begun and not ended."""
    begun = [file for file in folder.glob("*.pid") if not file.with_suffix(".ended.json").exists()]
    return {f"rank {file.stem}": int(file.read_text()) for file in begun}


def _signal_workers(folder: Path, number: int, signalled: set[str]) -> None:
    """Sends a signal to the workers that have begun and have not received it yet."""
    for file in folder.glob("*.pid"):
        if file.name not in signalled and not file.with_suffix(".ended.json").exists():
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), number)
        signalled.add(file.name)


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker, as seen by its parent."""

    rank: int
    code: int
    """As in `subprocess`: negative after a signal."""
    time: float
    signalled: bool
    """Whether the tool ended it because another worker had failed."""

    @classmethod
    def read_all(cls, folder: Path) -> list[WorkerExit]:
        """Reads the exits of all workers that have ended. folder: where their wrappers report them."""
        return [cls(**json.loads(file.read_text())) for file in sorted(folder.glob("*.ended.json"))]

    @property
    def failed(self) -> bool:
        """Whether it neither finished nor stopped after saving."""
        return self.code not in (Exit.DONE, Exit.RESUME)

    @property
    def failure_order(self) -> tuple[int, float]:
        """Orders failures: a worker that was killed cannot have been brought down by another."""
        return (0 if -self.code in KILL_SIGNALS and not self.signalled else 1), self.time


def _outcome(job: ToolJob, folder: Path, code: int, stopped_by: int | None, stopped: list[Problem]) -> int:
    """Returns the exit code of the job, or raises the error of the worker that failed first.

    stopped: the workers that were stopped.
    """
    workers = WorkerExit.read_all(folder)
    failed = [worker for worker in workers if worker.failed]
    if len(workers) == job.plan.workers and not failed:
        return Exit.RESUME if any(worker.code == Exit.RESUME for worker in workers) else Exit.DONE
    failures = [Failure.read(job.run_dir.error_file(worker.rank)) for worker in failed]
    reported = min((failure for failure in failures if failure), key=lambda failure: failure.time, default=None)
    if reported is not None and reported.is_cut_off and stopped:
        raise WorkerError(stopped)
    first = min(failed, key=lambda worker: worker.failure_order, default=None)
    was_killed = first is not None and first.failure_order[0] == 0
    if reported is not None and (error := reported.user_error()) is not None and not was_killed:
        raise error
    if stopped_by is not None and (first is None or -first.code in STOP_SIGNALS):
        return exit_code_before_first_step(stopped_by)  # it did not handle signals yet
    if first is None:
        message, fix = f"ended with exit code {code}", f"see {job.run_dir.logs / 'launcher.log'}"
        raise WorkerError(Problem("worker.died", f"--launcher {job.tool}", message, fix))
    rank, message = first.rank, describe_exit(first.code)
    if reported and not was_killed:
        rank, message = reported.rank, reported.summary
    raise WorkerError(Problem("worker.died", f"rank {rank}", message, f"see {job.run_dir.log_file(rank)}"))


def manual_commands(
    tool: Tool, plan: Plan, script: tuple[str, ...], folder: Path, planned: tuple[str, ...]
) -> list[str]:
    """Returns the shell commands that start a plan by hand; for several machines, the one that each of them runs.

    script: the recipe file and its arguments, with its run directory. folder: where the plan is written for accelerate,
    by `llmtrain` with the arguments `planned`.
    """
    nodes, each = plan.cluster.nodes, plan.cluster.devices_per_node
    head, node = '"${HEAD:?the first node}"', '"${NODE:?0 on the first node, 1 on the next}"'
    comment = f"# on each of the {nodes} nodes, where NODE is its number, from 0, and HEAD the name of the first"
    comments = [comment] if nodes > 1 else []
    if tool == "torchrun":
        single_node = f"torchrun --standalone --nproc-per-node {each}"
        rendezvous = f"--node-rank {node} --master-addr {head} --master-port {PORT}"
        multi_node = f"python -m llmtrain.launch.torchrun --nnodes {nodes} --nproc-per-node {each} {rendezvous}"
        return [*comments, f"{multi_node if nodes > 1 else single_node} {shlex.join(script)}"]
    write = shlex.join(["llmtrain", *planned, "--write", str(folder)])
    rendezvous = f" --machine_rank {node} --main_process_ip {head} --main_process_port {PORT}" if nodes > 1 else ""
    configuration = shlex.quote(str(folder / "accelerate.yaml"))
    return [
        "# once",
        write,
        *comments,
        f"accelerate launch --config_file {configuration}{rendezvous} {shlex.join(script)}",
    ]
