"""A measuring worker: `python -m llmtrain.self_test.worker FOLDER`, started by `llmtrain doctor --self-test`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llmtrain.launch import discover
from llmtrain.run_dir import RunDir
from llmtrain.self_test.job import MeasureJob, job_file, rates_file
from llmtrain.system.durable import write_atomically
from llmtrain.system.untrusted import read_json
from llmtrain.train.console import take_over_output


def main() -> None:
    """Measures this rank's device; exits as a worker does."""
    rank = discover(os.environ, sys.argv)
    if rank is None:
        raise SystemExit("llmtrain.self_test.worker is started by `llmtrain doctor --self-test`")
    folder = Path(sys.argv[1])
    output = take_over_output(RunDir(folder), rank)
    try:
        # After the output is redirected, since these load torch and DeepSpeed, which print.
        from llmtrain.runtime.distributed import init_process_group
        from llmtrain.self_test.measure import measure

        job = read_json(job_file(folder), MeasureJob)
        device = init_process_group(rank, on_cpu=job.cluster.spec.on_cpu)
        write_atomically(rates_file(folder, rank.rank), measure(job.cluster, device).model_dump_json())
    except BaseException as error:
        # Not sys.exit: a process group cannot be torn down while other ranks wait in a collective.
        os._exit(output.report_failure(error))


if __name__ == "__main__":
    main()
