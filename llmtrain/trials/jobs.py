"""Runs a job in workers of this machine: the launcher writes it to a folder, and each worker reads it there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from llmtrain.launch import Rank, discover, run_workers
from llmtrain.launch.fork_server import ForkServer
from llmtrain.recipe import Part
from llmtrain.run_dir import RunDir
from llmtrain.system.untrusted import read_json
from llmtrain.train.console import redirect_output

J = TypeVar("J", bound=Part)
Say = Callable[[str], None]
"""Prints a text for the user on rank 0; a line ends where the text has a newline."""


def run_job(
    module: str,
    job: Part,
    file: str,
    world_size: int,
    run_dir: RunDir,
    env: Mapping[str, str] | None = None,
    fork_server: ForkServer | None = None,
) -> int:
    """Runs a job in `world_size` workers. Returns and raises as `run_workers` does.

    module: the module of the workers, which calls `run_worker`. file: name of the file for the job in `run_dir`.
    """
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    (run_dir.path / file).write_text(job.model_dump_json(indent=2) + "\n")
    command = [sys.executable, "-m", module, str(run_dir.path)]
    return run_workers(command, world_size, run_dir, env, fork_server=fork_server)


def run_worker(command: str, file: str, kind: type[J], work: Callable[[J, Rank, Path, Say], None]) -> None:
    """Is the main function of a worker that `command` starts with a folder as its argument; exits as a worker does.

    work: does this rank's part, given the job in the folder. It loads torch and DeepSpeed, which print, so it runs
    after the output is redirected.
    """
    rank = discover(os.environ, sys.argv)
    if rank is None:
        raise SystemExit(f"this module is started by `{command}`")
    folder = Path(sys.argv[1])
    output = redirect_output(RunDir(folder), rank)

    def say(text: str) -> None:
        if rank.is_main:  # on standard error, since standard output is for the result
            print(text, end="", file=output.stderr, flush=True)

    try:
        work(read_json(folder / file, kind), rank, folder, say)
    except BaseException as error:
        # Not sys.exit: a process group cannot be torn down while other ranks wait in a collective.
        os._exit(output.report_failure(error))
