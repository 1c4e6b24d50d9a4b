"""Forks the ranks of a dry run: `python -m llmtrain.trials.dry_run.worker FOLDER`, started by the launcher.

Importing torch, DeepSpeed and transformers costs each process five seconds of a core and half a gigabyte; a laptop has
two cores for eight ranks. So one process imports, and the ranks are its children.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import signal
import sys
import time
from pathlib import Path

from llmtrain.errors import Problem, UserError, WorkerError
from llmtrain.launch import Failure, Rank, discover
from llmtrain.run_dir import RunDir
from llmtrain.system.parent import die_with
from llmtrain.system.untrusted import read_json
from llmtrain.train.console import WorkerOutput, redirect_output, run_worker
from llmtrain.trials.dry_run.job import JOB_FILE, DryRunJob

PATIENCE_S = 300
"""Seconds after which a rank that waits for another gives up; its log then shows where it waited."""
GRACE_S = 3.0
"""Seconds that the other ranks have to end by themselves after one has failed."""


def _work(_: Rank, folder: Path, output: WorkerOutput) -> None:
    """Does the job in the folder."""
    job = read_json(folder / JOB_FILE, DryRunJob)
    # What every rank needs. It computes nothing, since threads would not survive a fork.
    import llmtrain.trials.dry_run.ranks  # noqa: F401

    _watch({_fork(number, job, folder, output): number for number in range(job.plan.workers)}, RunDir(folder))


def _fork(number: int, job: DryRunJob, folder: Path, output: WorkerOutput) -> int:
    """Starts a rank and returns its process id."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 0
    try:
        die_with(parent, ctypes.CDLL(None).prctl)
        size = str(job.plan.workers)
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        rank = discover(os.environ)
        assert rank is not None, "its parent was one"
        # Rank 0 has the terminal of its parent; the output of the others goes to their logs.
        output = output if rank.is_main else redirect_output(RunDir(folder), rank)
        _run_rank(rank, job, folder, output)
    except BaseException as error:
        code = output.report_failure(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the rest of the stack belongs to the parent
    raise AssertionError("unreachable")


def _run_rank(rank: Rank, job: DryRunJob, folder: Path, output: WorkerOutput) -> None:
    from torch import distributed as dist

    from llmtrain.engines.runtime.distributed import init_process_group
    from llmtrain.trials.dry_run.ranks import run_rank

    def say(text: str) -> None:
        # On standard error, since standard output is for the result.
        if rank.is_main:
            print(text, file=output.stderr, flush=True)

    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    device = init_process_group(rank, on_cpu=True)
    run_rank(job, folder, device, say)
    dist.destroy_process_group()


def _watch(ranks: dict[int, int], run_dir: RunDir) -> None:
    """Waits for all ranks, given by process id.

    Raises the error of the one that failed first, after the others have ended.
    """
    failed: dict[int, int] = {}
    deadline = math.inf
    while ranks and time.monotonic() < deadline:
        child, status = os.waitpid(-1, os.WNOHANG if failed else 0)
        if not child:
            time.sleep(0.05)
            continue
        code, rank = os.waitstatus_to_exitcode(status), ranks.pop(child)
        if code:
            failed[rank] = code
            deadline = min(deadline, time.monotonic() + GRACE_S)
    for left in ranks:
        os.kill(left, signal.SIGKILL)
    if failed:
        raise _cause(failed, run_dir)


def _cause(failed: dict[int, int], run_dir: RunDir) -> UserError:
    """Returns the error of the rank that was killed, if any, else the first error, which caused the others."""
    failures = {rank: Failure.read(run_dir.error_file(rank)) for rank in failed}

    def order(rank: int) -> tuple[bool, float]:
        failure = failures[rank]
        return failed[rank] > 0, failure.time if failure else time.time()

    first = min(failed, key=order)
    failure, log = failures[first], run_dir.log_file(first)
    user_error = failure.user_error() if failure else None
    if user_error is not None:
        return user_error
    if failure is not None:
        return WorkerError(Problem("worker.died", f"rank {first}", failure.summary, f"see {log}"))
    code = failed[first]
    how = f"killed by signal {-code}" if code < 0 else f"gave up after waiting for {PATIENCE_S} s"
    return WorkerError(Problem("worker.died", f"rank {first}", how, f"see {log}"))


if __name__ == "__main__":
    run_worker("llmtrain train --dry-run", _work)
