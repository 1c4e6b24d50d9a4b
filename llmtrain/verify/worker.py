"""A worker of `llmtrain verify`: `python -m llmtrain.verify.worker FOLDER`, started by the launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llmtrain.launch import Rank, discover
from llmtrain.run_dir import RunDir
from llmtrain.system.untrusted import read_json
from llmtrain.train.console import WorkerOutput, take_over_output
from llmtrain.verify.job import VerifyJob, job_file


def main() -> None:
    """Does this rank's part of the job in the folder; exits as a worker does."""
    rank = discover(os.environ, sys.argv)
    if rank is None:
        raise SystemExit("llmtrain.verify.worker is started by `llmtrain verify`")
    folder = Path(sys.argv[1])
    output = take_over_output(RunDir(folder), rank)
    try:
        _work(rank, folder, output)
    except BaseException as error:
        # Not sys.exit: a process group cannot be torn down while other ranks wait in a collective.
        os._exit(output.report_failure(error))


def _work(rank: Rank, folder: Path, output: WorkerOutput) -> None:
    # After the output is redirected, since these load torch and DeepSpeed, which print.
    from torch import distributed as dist

    from llmtrain.runtime.distributed import init_process_group
    from llmtrain.verify.train import work

    def say(text: str) -> None:
        # On standard error, since standard output is for the result.
        if rank.is_main:
            print(text, end="", file=output.stderr, flush=True)

    job = read_json(job_file(folder), VerifyJob)
    device = init_process_group(rank, on_cpu=next(iter(job.plans.values())).cluster.spec.on_cpu)
    work(job, folder, device, say)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
