"""The documents of a checkpoint that describe its state, read without torch and validated."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from llmtrain.checkpoint.folder import PLAN_FILE, STATE_FILE
from llmtrain.checkpoint.history import Segment
from llmtrain.errors import CheckpointError, Problem
from llmtrain.plan import Plan
from llmtrain.untrusted import UNREADABLE, read_json, why

Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass
class TrainerState:
    """The position of a run; the content of `trainer.json`."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: Count = 0
    """Number of optimizer steps taken."""
    samples: Count = 0
    """Number of sequences consumed: the position in the data, independent of the batch size."""
    tokens: Count = 0
    """Number of target tokens consumed."""
    data: str = ""
    """Key of the prepared data to which `samples` refers."""
    eval_loss: float | None = None
    """Loss of the last evaluation, in nats per token."""
    eval_step: Count | None = None
    """Step of that evaluation."""
    rollbacks: Count = 0
    """How many times the run has rolled back to a checkpoint after too many skipped updates."""
    passed_over: Count = 0
    """Sequences among `samples` that these weights were not trained on: those skipped by rollbacks."""
    history: list[Segment] = field(default_factory=list)
    """The values that the steps were taken with."""

    def text(self) -> str:
        """Returns the content of `trainer.json`."""
        return json.dumps(asdict(self), indent=1)


def read_state(folder: Path) -> TrainerState:
    """Reads the position in a checkpoint. Raises CheckpointError if it cannot be read."""
    try:
        return read_json(folder / STATE_FILE, TrainerState)
    except UNREADABLE as error:
        problem = Problem("checkpoint.state", str(folder / STATE_FILE), f"cannot be read: {why(error)}")
    raise CheckpointError(problem)


def read_plan(folder: Path) -> Plan:
    """Reads the plan that a checkpoint was written under. Raises CheckpointError if it cannot be read."""
    try:
        return read_json(folder / PLAN_FILE, Plan)
    except UNREADABLE as error:
        problem = Problem("checkpoint.plan", str(folder / PLAN_FILE), f"cannot be read: {why(error)}")
    raise CheckpointError(problem)
