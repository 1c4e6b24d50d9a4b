"""What the ranks of a dry run are given, and what they find. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmtrain.plan.plan import Plan
from llmtrain.recipe import Part


class Job(Part):
    """What every rank does."""

    plan: Plan
    """The small plan."""
    data: str
    """Folder of its random documents."""
    checkpoints: str
    """Folder to save in."""


class Step(Part):
    """An optimizer step."""

    loss: float
    grad_norm: float
    """Before clipping."""
    lr: float
    seconds: float


class RankFacts(Part):
    """What a rank really was."""

    rank: int
    data_rank: int
    """The replica that it read for."""
    samples: tuple[int, ...]
    """Number of the first sample of each of its micro-batches in the first step."""


class Checkpoint(Part):
    """A checkpoint that was saved, and loaded into new engines, whose next step was the same bit for bit."""

    after_step: int
    files: int
    size: int
    """Bytes."""
    save_s: float
    load_s: float
    """With the building of new engines."""


class Findings(Part):
    """What the ranks found."""

    engine: dict[str, Any]
    """Rank 0's engine, as it describes itself."""
    steps: tuple[Step, ...]
    eval_loss: float | None
    """None where the recipe does not evaluate."""
    checkpoint: Checkpoint
    ranks: tuple[RankFacts, ...]


def job_file(folder: Path) -> Path:
    """What the ranks read."""
    return folder / "dry_run_job.json"


def findings_file(folder: Path) -> Path:
    """What rank 0 writes."""
    return folder / "findings.json"
