"""`llmtrain train --dry-run`: scales the plan down and runs it here."""

from __future__ import annotations

import json
import sys

from llmtrain.commands.request import TrainRequest
from llmtrain.errors import UserError


def run_small(request: TrainRequest) -> None:
    """Runs the scaled-down plan and prints the report, which is written next to the run directory of the real run."""
    from rich.console import Console

    from llmtrain.cluster import local_cluster
    from llmtrain.dry_run.run import REPORT, dry_run
    from llmtrain.precheck import check_stages, runnable_plan
    from llmtrain.run_dir import RunDir

    try:
        declared, written_for = request.load()
        beside = request.folder(declared).path
        beside = beside if beside.name else beside.resolve()
        folder = RunDir(beside.parent / f"{beside.name}-dry-run")
        cluster = local_cluster(request.nproc) if request.nproc else request.cluster(written_for)
        plan = runnable_plan(declared, cluster)
        check_stages(plan)
        report = dry_run(plan, folder)
    except UserError as error:
        if request.as_json:
            print(json.dumps({"passed": False} | error.as_dict(), indent=2))
            sys.exit(error.exit_code)
        raise
    if request.as_json:
        print(json.dumps(report.document(), indent=2))
        print(f"report {folder.path / REPORT}", file=sys.stderr)
        return
    console = Console()
    for line in report.lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(report.table())
    console.print(f"report {folder.path / REPORT}", highlight=False, markup=False, soft_wrap=True)
