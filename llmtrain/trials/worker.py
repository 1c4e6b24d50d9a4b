"""A worker of a job (`llmtrain.trials.jobs`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from pkgutil import resolve_name

from llmtrain.launch import discover
from llmtrain.run_dir import RunDir
from llmtrain.system.untrusted import read_json
from llmtrain.train.console import redirect_output
from llmtrain.trials.jobs import Job


def main() -> None:
    """Does this rank's part of a job; exits as a worker does."""
    rank = discover(os.environ, sys.argv)
    if rank is None:
        raise SystemExit(
            "`llmtrain verify`, `llmtrain doctor --self-test` and `llmtrain train --dry-run` start workers"
        )
    kind: type[Job] = resolve_name(sys.argv[1])
    folder = Path(sys.argv[2])
    output = redirect_output(RunDir(folder), rank)

    def say(text: str) -> None:
        if rank.is_main:  # on standard error, since standard output is for the result
            print(text, end="", file=output.stderr, flush=True)

    try:
        # Imported here: torch and DeepSpeed print when they are loaded, and the output is redirected now.
        from torch import distributed as dist

        from llmtrain.engines.runtime.distributed import init_process_group

        job = read_json(folder / kind.file, kind)
        device = init_process_group(rank, on_cpu=job.on_cpu)
        resolve_name(kind.work)(job, folder, device, say)
        dist.destroy_process_group()
    except BaseException as error:
        # Not sys.exit: a process group cannot be torn down while other ranks wait in a collective.
        os._exit(output.report_failure(error))


if __name__ == "__main__":
    main()
