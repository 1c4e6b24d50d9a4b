"""A worker of `llmtrain verify`: `python -m llmtrain.trials.verify.worker FOLDER`, started by the launcher."""

from __future__ import annotations

from pathlib import Path

from llmtrain.launch import Rank
from llmtrain.system.untrusted import read_json
from llmtrain.train.console import WorkerOutput, run_worker
from llmtrain.trials.verify.job import JOB_FILE, VerifyJob


def _work(rank: Rank, folder: Path, output: WorkerOutput) -> None:
    """Does this rank's part of the job in the folder."""
    from torch import distributed as dist

    from llmtrain.engines.runtime.distributed import init_process_group
    from llmtrain.trials.verify.train import verify_rank

    def say(text: str) -> None:
        # On standard error, since standard output is for the result.
        if rank.is_main:
            print(text, end="", file=output.stderr, flush=True)

    job = read_json(folder / JOB_FILE, VerifyJob)
    device = init_process_group(rank, on_cpu=next(iter(job.plans.values())).cluster.spec.on_cpu)
    verify_rank(job, folder, device, say)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_worker("llmtrain verify", _work)
