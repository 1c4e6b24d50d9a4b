"""The launcher's part: groups plans by world size, starts workers for each, and writes one certificate."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import Problem, RecipeError, StoppedError, UserError
from llmtrain.launch.fork_server import ForkServer
from llmtrain.plan.search.enumerate import NamedPlan, RefusedPlan
from llmtrain.run_dir import RunDir, environment, write_json
from llmtrain.run_dir.lock import RunLock
from llmtrain.trials.jobs import run_job
from llmtrain.trials.verify.job import (
    CURRENT_FILE,
    JOB_FILE,
    VERDICTS_FILE,
    Certificate,
    Verdict,
    VerifyJob,
    add_verdict,
    read_references,
    read_verdicts,
)

if TYPE_CHECKING:
    from llmtrain.recipe import Recipe


def verify(
    recipe: Recipe, plans: list[NamedPlan], refused: list[RefusedPlan], steps: int, run_dir: RunDir
) -> Certificate:
    """Trains the reference and every plan, compares them, and writes `certificate.json`.

    The verdict of a plan whose workers fail is that failure. recipe: as returned by `comparable`; its data must be
    prepared. Raises StoppedError if a signal stopped the workers, RecipeError for a folder with other content, and
    errors of workers that do not belong to a plan.
    """
    folder = run_dir.path
    with RunLock.take(folder, lambda line: _say(f"{line}\n")):
        _clear(folder)
        job = VerifyJob(recipe=recipe, steps=steps, plans={named_plan.name: named_plan.plan for named_plan in plans})
        # One worker first, which trains the reference.
        with ForkServer() as fork_server:
            forked_from = fork_server if job.on_cpu else None
            for world_size in sorted({1, *(named_plan.plan.workers for named_plan in plans)}):
                _run(job, world_size, run_dir, forked_from)
        certificate = Certificate(
            recipe=job.recipe,
            steps=job.steps,
            device=next(iter(job.plans.values())).cluster.device,
            started=datetime.fromtimestamp(job.started, UTC).isoformat(timespec="seconds"),
            seconds=round(time.time() - job.started, 1),
            environment=environment(),
            reference=read_references(folder),
            verdicts=tuple(read_verdicts(folder)),
            refused=tuple({"name": refusal.name, "rule": refusal.problem.rule} for refusal in refused),
        )
        write_json(folder / "certificate.json", certificate.document())
        return certificate


def _run(job: VerifyJob, world_size: int, run_dir: RunDir, fork_server: ForkServer | None) -> None:
    """Starts workers for the plans of a world size, and new ones for the remaining plans after some plans, and after
    each that failed.

    A process group that has lost a rank in a collective cannot be used again.
    """
    _say(f"{world_size} worker{'s' if world_size > 1 else ''}\n")
    while True:
        started = time.monotonic()
        try:
            code = run_job(job, world_size, run_dir, fork_server=fork_server)
        except UserError as error:
            name = _in_progress(run_dir.path)
            if name is None:
                raise
            seconds = round(time.monotonic() - started, 2)
            verdict = Verdict(name=name, layout=job.plans[name].layout(), failure=str(error), seconds=seconds)
            add_verdict(run_dir.path, verdict)
            _say(f"FAILED: {verdict.failure}\n")
        else:
            if code:
                raise StoppedError(code, run_dir.path)
        judged = {verdict.name for verdict in read_verdicts(run_dir.path)}
        if all(name in judged for name, _ in job.of_size(world_size)):
            return


def _in_progress(folder: Path) -> str | None:
    """Returns the plan that was begun and has no verdict, or None."""
    current = folder / CURRENT_FILE
    name = current.read_text() if current.exists() else None
    return None if name in {verdict.name for verdict in read_verdicts(folder)} else name


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _clear(folder: Path) -> None:
    """Removes the results of an earlier verification from the folder."""
    if any(folder.glob("[!.]*")) and not (folder / JOB_FILE).is_file():
        message = f"{folder} is not empty and contains no verification"
        raise RecipeError(Problem("run_dir.folder", "--run-dir", message, "choose a new folder"))
    for pattern in ("certificate.json", "reference-*", VERDICTS_FILE, CURRENT_FILE, "initial.safetensors"):
        for stale in folder.glob(pattern):
            stale.unlink()
