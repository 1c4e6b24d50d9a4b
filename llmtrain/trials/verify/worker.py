"""A worker of `llmtrain verify`: `python -m llmtrain.trials.verify.worker FOLDER`, started by the launcher."""

from __future__ import annotations

from pathlib import Path

from llmtrain.launch import Rank
from llmtrain.trials.jobs import Say, run_worker
from llmtrain.trials.verify.job import JOB_FILE, VerifyJob


def _work(job: VerifyJob, rank: Rank, folder: Path, say: Say) -> None:
    from torch import distributed as dist

    from llmtrain.engines.runtime.distributed import init_process_group
    from llmtrain.trials.verify.train import verify_rank

    device = init_process_group(rank, on_cpu=next(iter(job.plans.values())).cluster.spec.on_cpu)
    verify_rank(job, folder, device, say)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_worker("llmtrain verify", JOB_FILE, VerifyJob, _work)
