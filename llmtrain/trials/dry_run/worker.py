"""A rank of a dry run: `python -m llmtrain.trials.dry_run.worker FOLDER`, started by the launcher."""

from __future__ import annotations

import faulthandler
from pathlib import Path

from llmtrain.launch import Rank
from llmtrain.trials.dry_run.job import JOB_FILE, DryRunJob
from llmtrain.trials.jobs import Say, run_worker

TIMEOUT_S = 300
"""Seconds after which a rank that waits for another gives up; its log then shows where it waited."""


def _work(job: DryRunJob, rank: Rank, folder: Path, say: Say) -> None:
    from torch import distributed as dist

    from llmtrain.engines.runtime.distributed import init_process_group
    from llmtrain.trials.dry_run.ranks import run_rank

    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    run_rank(job, folder, init_process_group(rank, on_cpu=True), say)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    run_worker("llmtrain train --dry-run", JOB_FILE, DryRunJob, _work)
