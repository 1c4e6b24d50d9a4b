"""A measuring worker: `python -m llmtrain.trials.self_test.worker FOLDER`, started by `llmtrain doctor --self-test`."""

from __future__ import annotations

from pathlib import Path

from llmtrain.launch import Rank
from llmtrain.system.durable import write_atomically
from llmtrain.trials.jobs import Say, run_worker
from llmtrain.trials.self_test.job import JOB_FILE, MeasureJob, rates_file


def _work(job: MeasureJob, rank: Rank, folder: Path, _: Say) -> None:
    from llmtrain.engines.runtime.distributed import init_process_group
    from llmtrain.trials.self_test.measure import measure_device

    device = init_process_group(rank, on_cpu=job.cluster.spec.on_cpu)
    write_atomically(rates_file(folder, rank.rank), measure_device(job.cluster, device).model_dump_json())


if __name__ == "__main__":
    run_worker("llmtrain doctor --self-test", JOB_FILE, MeasureJob, _work)
