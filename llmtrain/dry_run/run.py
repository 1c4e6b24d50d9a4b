"""The launcher's side of a dry run: shrinks the plan, starts its ranks here, reports, and tidies up. Pure."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.dry_run.job import Findings, Job, findings_file, job_file
from llmtrain.dry_run.report import Report, ranks
from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.shrink import layers_kept, shrink
from llmtrain.run_dir import RunDir, write_json

if TYPE_CHECKING:
    from llmtrain.plan import Plan

REPORT = "dry_run.json"
"""What is left in the folder."""
SCRATCH = "scratch"
"""Data and checkpoints, which go in any case."""
OURS = {REPORT, SCRATCH, "logs", "dry_run_job.json", "findings.json", "launch.json"}
"""All that a dry run writes into its folder."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""Of the ranks, of which there are more than cores, and no GPU is to be woken."""


def dry_run(plan: Plan, run_dir: RunDir) -> Report:
    """Runs a plan made small, and leaves the report in `run_dir`, and nothing else; after a failure, the logs.

    Exits where the ranks were stopped by a signal. Raises RecipeError for a folder that holds something else
    and for a model that no tiny copy can be made of, and what a rank raises.
    """
    started = time.monotonic()
    folder = run_dir.path
    _clear(folder)
    # Here and not above: these load torch, or numpy, which a login node may do without.
    from llmtrain.data import find_prepared
    from llmtrain.data.synthetic import synthetic
    from llmtrain.dry_run.model import tiny_model
    from llmtrain.dry_run.order import first_batches
    from llmtrain.launch import run_workers

    shrunk = shrink(plan, tiny_model(plan.recipe, layers_kept(plan)))
    try:
        run_dir.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot write {folder}: {error.strerror}"
        raise RecipeError(Problem("run_dir.write", "--run-dir", message, "name a folder that can be written")) from None
    scratch = folder / SCRATCH
    try:
        job = Job(plan=shrunk.plan, data=str(scratch / "data"), checkpoints=str(scratch / "checkpoints"))
        synthetic(job.plan.recipe, Path(job.data))
        job_file(folder).write_text(job.model_dump_json() + "\n")
        print(f"dry run: {ranks(job.plan)} on this machine", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "llmtrain.dry_run.worker", str(folder)]
        code = run_workers(command, 1, run_dir, ENVIRONMENT)
        if code:
            sys.exit(code)
        findings = Findings.model_validate_json(findings_file(folder).read_text())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report = Report(
        plan=plan,
        shrunk=shrunk.plan,
        changes=shrunk.changes,
        order=first_batches(plan, find_prepared(plan.recipe)),
        findings=findings,
        seconds=round(time.monotonic() - started, 1),
    )
    _tidy(folder)
    write_json(folder / REPORT, report.document())
    return report


def _clear(folder: Path) -> None:
    """Forgets an earlier dry run in this folder."""
    if folder.exists() and not folder.is_dir():
        raise RecipeError(Problem("run_dir.folder", "--run-dir", f"{folder} is a file", "name another folder"))
    strangers = sorted({path.name for path in folder.glob("*")} - OURS)
    if strangers:
        message = f"{folder} holds something else than a dry run ({strangers[0]} is in it)"
        raise RecipeError(Problem("run_dir.folder", "--run-dir", message, "name a new folder"))
    _tidy(folder)


def _tidy(folder: Path) -> None:
    """Removes all that a dry run writes."""
    for path in folder.glob("*"):
        if path.name in OURS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
