"""The launcher's part of a dry run: scales the plan down, starts its ranks, reports, and removes its files."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import Problem, RecipeError
from llmtrain.run_dir import RunDir, write_json
from llmtrain.system.untrusted import read_json
from llmtrain.trials.dry_run.job import JOB_FILE, RESULT_FILE, DryRunJob, DryRunResult
from llmtrain.trials.dry_run.report import DryRunReport, ranks
from llmtrain.trials.dry_run.shrink import layers_kept, shrink_plan

if TYPE_CHECKING:
    from llmtrain.plan import Plan

REPORT = "dry_run.json"
"""The file that is left in the folder."""
SCRATCH = "scratch"
"""Data and checkpoints, which are always removed."""
OURS = {REPORT, SCRATCH, "logs", JOB_FILE, RESULT_FILE, "launch.json"}
"""All that a dry run writes to its folder."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""Environment of the ranks: there are more of them than cores, and no GPU may be initialised."""


def dry_run(plan: Plan, run_dir: RunDir) -> DryRunReport:
    """Runs a scaled-down plan, and leaves only the report in `run_dir`; after a failure, also the logs.

    Exits if the ranks were stopped by a signal. Raises RecipeError for a folder with other content and for a model of
    which no tiny copy can be made, and the errors of a rank.
    """
    started = time.monotonic()
    folder = run_dir.path
    _clear(folder)
    # Imported here: these load torch, or numpy, which a login node may lack.
    from llmtrain.data import find_prepared
    from llmtrain.data.synthetic import synthetic
    from llmtrain.launch.fork_server import ForkServer
    from llmtrain.trials.dry_run.model import tiny_model
    from llmtrain.trials.dry_run.order import first_batches
    from llmtrain.trials.jobs import run_job

    shrunk = shrink_plan(plan, tiny_model(plan.recipe, layers_kept(plan)))
    try:
        run_dir.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot write {folder}: {error.strerror}"
        raise RecipeError(
            Problem("run_dir.write", "--run-dir", message, "choose a folder that can be written")
        ) from None
    scratch = folder / SCRATCH
    try:
        job = DryRunJob(plan=shrunk.plan, data=str(scratch / "data"), checkpoints=str(scratch / "checkpoints"))
        synthetic(job.plan.recipe, Path(job.data))
        print(f"dry run: {ranks(job.plan)} on this machine", file=sys.stderr, flush=True)
        # One process imports torch, DeepSpeed and transformers: a laptop has two cores for eight ranks.
        with ForkServer(("llmtrain.trials.dry_run.ranks",)) as fork_server:
            if code := run_job(job, job.plan.workers, run_dir, ENVIRONMENT, fork_server):
                sys.exit(code)
        result = read_json(folder / RESULT_FILE, DryRunResult)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report = DryRunReport(
        plan=plan,
        shrunk=shrunk.plan,
        changes=shrunk.changes,
        order=first_batches(plan, find_prepared(plan.recipe)),
        result=result,
        seconds=round(time.monotonic() - started, 1),
    )
    _tidy(folder)
    write_json(folder / REPORT, report.document())
    return report


def _clear(folder: Path) -> None:
    """Removes an earlier dry run from this folder."""
    if folder.exists() and not folder.is_dir():
        raise RecipeError(Problem("run_dir.folder", "--run-dir", f"{folder} is a file", "choose another folder"))
    if foreign := sorted({path.name for path in folder.glob("*")} - OURS):
        message = f"{folder} contains something other than a dry run ({foreign[0]} is in it)"
        raise RecipeError(Problem("run_dir.folder", "--run-dir", message, "choose a new folder"))
    _tidy(folder)


def _tidy(folder: Path) -> None:
    """Removes all that a dry run writes. Of a link only the link: what it points to is the user's."""
    for path in folder.glob("*"):
        if path.name in OURS:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
