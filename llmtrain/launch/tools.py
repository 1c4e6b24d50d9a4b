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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, Literal

from llmtrain.errors import Exit, Problem, RecipeError, WorkerError
from llmtrain.launch.authentication import Secret
from llmtrain.launch.failure import WorkerExit, clear_failures, exit_code_before_first_step, job_exit_code
from llmtrain.launch.jobs.accelerate import has_configuration, render_configuration
from llmtrain.launch.rendezvous import TORCHRUN_PORT
from llmtrain.plan.plan import Plan
from llmtrain.run_dir import RunDir
from llmtrain.system.parent import start_child
from llmtrain.system.stops import QUIT, caught_signals

Tool = Literal["torchrun", "accelerate"]
TOOLS: tuple[Tool, ...] = ("torchrun", "accelerate")
LOOK_S = 0.2
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@dataclass(frozen=True)
class ToolEnd:
    """How a tool ended, and the workers that it has started."""

    code: int
    """Its exit code, which says little."""
    exits: list[WorkerExit]
    stopped_by: int | None
    """The signal that stopped the run."""
    was_interrupted: bool
    """Whether another signal ended the wait for it."""


def check_tool(tool: Tool, plan: Plan) -> None:
    """Raises RecipeError if the tool cannot start the plan."""
    if tool == "accelerate" and not has_configuration(plan):
        strategy = plan.recipe.parallel.strategy
        message = f"has no configuration for parallel.backend={strategy}"
        raise RecipeError(Problem("launch.accelerate", "--launcher accelerate", message, "--launcher torchrun"))


def run_by_tool(tool: Tool, plan: Plan, run_dir: RunDir, arguments: Sequence[str]) -> int:
    """Runs the workers of a plan on this machine. Returns and raises as `run_workers` does.

    arguments: those of `llmtrain.train.worker`.
    """
    clear_failures(run_dir)
    command, worker = _command(tool, plan, run_dir), ["-m", "llmtrain.train.worker", *arguments]
    run_dir.write_launch(tool, plan.workers, [*command, *worker])
    log = run_dir.logs / "launcher.log"
    with log.open("ab") as errors:
        end = run_tool(command, worker, errors, Secret.new().environment)
    if end.was_interrupted:
        return Exit.INTERRUPTED
    if len(end.exits) == plan.workers or any(worker.failed for worker in end.exits):
        return job_exit_code(end.exits, run_dir, end.stopped_by)
    if end.stopped_by is not None:
        return exit_code_before_first_step(end.stopped_by)  # the workers did not handle signals yet
    raise WorkerError(Problem("worker.died", f"--launcher {tool}", f"ended with exit code {end.code}", f"see {log}"))


def _command(tool: Tool, plan: Plan, run_dir: RunDir) -> list[str]:
    if tool == "torchrun":
        return [*TORCHRUN, "--standalone", f"--nproc-per-node={plan.workers}"]
    configuration = run_dir.path / "accelerate.yaml"
    configuration.write_text(render_configuration(plan, run_dir.ds_config_file.absolute()), encoding="utf-8")
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configuration)]


def run_tool(
    command: Sequence[str],
    script: Sequence[str],
    errors: IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
) -> ToolEnd:
    """Runs a tool in a session of its own, so that a Ctrl-C reaches the workers through us.

    script: arguments of each worker's Python. errors: receives the tool's own messages. env: variables that override
    those of this process.
    """
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as name, caught_signals() as events:
        folder = Path(name)
        wrapped = [*command, "-m", "llmtrain.launch.worker_wrapper", name, *script]
        process = start_child(wrapped, env={**os.environ, **(env or {})}, stderr=errors, start_new_session=True)
        try:
            stopped_by, was_interrupted = _wait(process, folder, events)
        finally:
            process.kill()  # workers end with the tool, by `die_with`
            process.wait()
        exits = [WorkerExit(**json.loads(file.read_text())) for file in sorted(folder.glob("*.ended.json"))]
    return ToolEnd(process.returncode, exits, stopped_by, was_interrupted)


def _wait(process: subprocess.Popen[bytes], folder: Path, events: SimpleQueue[Any]) -> tuple[int | None, bool]:
    """Waits for a tool. Returns the signal that stopped the run, and whether another signal ended the wait."""
    stopped_by: int | None = None
    signalled: set[str] = set()
    while process.poll() is None:
        with suppress(Empty):
            event: int = events.get(timeout=LOOK_S)
            if event == QUIT:
                return stopped_by, True
            stopped_by = stopped_by or event
        if stopped_by is not None:
            _signal_workers(folder, stopped_by, signalled)
    return stopped_by, False


def _signal_workers(folder: Path, number: int, signalled: set[str]) -> None:
    """Sends a signal to the workers that have begun and have not received it yet."""
    for file in folder.glob("*.pid"):
        if file.name not in signalled and not file.with_suffix(".ended.json").exists():
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), number)
        signalled.add(file.name)


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
        rendezvous = f"--node-rank {node} --master-addr {head} --master-port {TORCHRUN_PORT}"
        multi_node = f"python -m llmtrain.launch.torchrun --nnodes {nodes} --nproc-per-node {each} {rendezvous}"
        return [*comments, f"{multi_node if nodes > 1 else single_node} {shlex.join(script)}"]
    write = shlex.join(["llmtrain", *planned, "--write", str(folder)])
    rendezvous = (
        f" --machine_rank {node} --main_process_ip {head} --main_process_port {TORCHRUN_PORT}" if nodes > 1 else ""
    )
    configuration = shlex.quote(str(folder / "accelerate.yaml"))
    return [
        "# once",
        write,
        *comments,
        f"accelerate launch --config_file {configuration}{rendezvous} {shlex.join(script)}",
    ]
