"""The launcher's side: plans grouped by world size, one start of workers for each, one certificate. Pure."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from llmtrain.errors import Problem, RecipeError
from llmtrain.plan.enumerate import NamedPlan, Refused
from llmtrain.run_dir import RunDir, write_json
from llmtrain.verify.job import (
    PROBES,
    Certificate,
    Job,
    Reference,
    Verdict,
    job_file,
    reference_file,
    verdicts_file,
)

if TYPE_CHECKING:
    from llmtrain.recipe import Recipe


def verify(recipe: Recipe, plans: list[NamedPlan], refused: list[Refused], steps: int, run_dir: RunDir) -> Certificate:
    """Trains the reference and every plan, compares, and writes `certificate.json`.

    recipe: as `comparable` gives it; its data must be prepared. Exits where the workers were stopped
    by a signal. Raises RecipeError for a folder that holds something else, and what a worker raises.
    """
    folder = run_dir.path
    _clear(folder)
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    job = Job(recipe=recipe, steps=steps, plans={one.name: one.plan for one in plans})
    job_file(folder).write_text(job.model_dump_json(indent=2) + "\n")
    # One worker first, which makes the reference.
    for world_size in sorted({1, *(one.plan.workers for one in plans)}):
        _run(world_size, run_dir)
    certificate = _collect(job, refused, folder)
    write_json(folder / "certificate.json", certificate.document())
    return certificate


def _run(world_size: int, run_dir: RunDir) -> None:
    from llmtrain.launch import run_workers

    print(f"{world_size} worker{'s' if world_size > 1 else ''}", file=sys.stderr, flush=True)
    code = run_workers([sys.executable, "-m", "llmtrain.verify.worker", str(run_dir.path)], world_size, run_dir)
    if code:
        sys.exit(code)


def _clear(folder: Path) -> None:
    """Forgets an earlier verification in this folder."""
    if folder.exists() and any(folder.iterdir()) and not job_file(folder).is_file():
        message = f"{folder} is not empty and holds no verification"
        raise RecipeError(Problem("run_dir.folder", "--run-dir", message, "name a new folder"))
    for pattern in ("certificate.json", "reference-*", "verdicts-*", "initial.safetensors"):
        for stale in folder.glob(pattern):
            stale.unlink()


def _collect(job: Job, refused: list[Refused], folder: Path) -> Certificate:
    verdicts = []
    for world_size in sorted({plan.workers for plan in job.plans.values()}):
        lines = verdicts_file(folder, world_size).read_text().splitlines()
        verdicts += [Verdict.model_validate_json(line) for line in lines]
    references = {probe: Reference.model_validate_json(reference_file(folder, probe).read_text()) for probe in PROBES}
    return Certificate(
        recipe=job.recipe.name,
        precision=job.recipe.parallel.precision,
        steps=job.steps,
        reference=references,
        verdicts=tuple(verdicts),
        refused=tuple({"name": one.name, "rule": one.problem.rule} for one in refused),
    )


def table(certificate: Certificate) -> Table:
    """Each plan with its largest deviations, its verdict and the seconds it took."""
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("plan", no_wrap=True)
    for name in ("loss", "grad norm", "weights"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    shown.add_column("s", justify="right")
    for verdict in certificate.verdicts:
        cells = _cells(certificate.max_deviation(verdict))
        shown.add_row(verdict.name, *cells, _judged(certificate, verdict), f"{verdict.seconds:.1f}")
    return shown


def summary(certificate: Certificate) -> list[str]:
    """What was allowed, how many plans are certified, and how many were refused by which rule."""
    total, deviating = len(certificate.verdicts), len(certificate.deviating)
    lines = []
    for probe in PROBES:
        loss, grad_norm, weights = _cells(certificate.reference[probe].tolerance.model_dump())
        lines.append(f"allowed ({probe}): loss {loss}, grad norm {grad_norm}, weights {weights}")
    lines.append(f"{total - deviating} of {total} plans certified: {certificate.steps} steps, {certificate.precision}")
    rules = Counter(one["rule"] for one in certificate.refused)
    if rules:
        told = ", ".join(f"{count} by {rule}" for rule, count in rules.most_common())
        lines.append(f"{len(certificate.refused)} refused: {told}")
    return lines


def _cells(deviation: dict[str, float | None]) -> list[str]:
    values = (deviation[name] for name in ("loss", "grad_norm", "weights"))
    return ["not finite" if value is None else f"{value:.1e}" for value in values]


def _judged(certificate: Certificate, verdict: Verdict) -> str:
    if certificate.certified(verdict):
        return "certified"
    return "DEVIATES" if all(one.same_lr for one in verdict.deviations.values()) else "DEVIATES (lr)"
