"""The input and the output of the ranks of a dry run."""

from __future__ import annotations

from typing import Any

from llmtrain.plan.plan import Plan
from llmtrain.recipe import Part
from llmtrain.trials.jobs import Job

JOB_FILE = "dry_run_job.json"
"""The file that the ranks read."""
RESULT_FILE = "findings.json"
"""The file that rank 0 writes."""


class DryRunJob(Job):
    """The input of every rank."""

    file = JOB_FILE
    work = "llmtrain.trials.dry_run.ranks:run_rank"

    plan: Plan
    """The scaled-down plan."""
    data: str
    """Folder of the plan's random documents."""
    checkpoints: str
    """Folder for checkpoints."""

    @property
    def on_cpu(self) -> bool:
        """Always, since the devices of the plan need not be here."""
        return True


class DryRunStep(Part):
    """An optimizer step."""

    loss: float
    grad_norm: float
    """Norm before clipping."""
    lr: float
    seconds: float


class RankFacts(Part):
    """The actual position of a rank."""

    rank: int
    data_rank: int
    """The replica for which it read."""
    samples: tuple[int, ...]
    """Index of the first sample of each of its micro-batches in the first step."""


class Checkpoint(Part):
    """A checkpoint that was saved and loaded into new engines, whose next step was bitwise identical."""

    after_step: int
    files: int
    size: int
    """Size in bytes."""
    save_s: float
    load_s: float
    """Seconds to load it, including building new engines."""


class DryRunResult(Part):
    """The results of the ranks."""

    engine: dict[str, Any]
    """Rank 0's engine, as it describes itself."""
    steps: tuple[DryRunStep, ...]
    eval_loss: float | None
    """None if the recipe does not evaluate."""
    checkpoint: Checkpoint
    ranks: tuple[RankFacts, ...]
