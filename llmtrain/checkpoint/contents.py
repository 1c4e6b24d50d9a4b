"""The documents of a checkpoint that say what it is a state of: read without torch, and checked."""

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
    """Position of a run; what `trainer.json` holds."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: Count = 0
    """Optimizer steps taken."""
    samples: Count = 0
    """Sequences consumed: the cursor of the data, whatever the batch size was."""
    tokens: Count = 0
    """Target tokens consumed."""
    data: str = ""
    """Key of the prepared data that `samples` counts in."""
    eval_loss: float | None = None
    """Last evaluation, in nats per token."""
    eval_step: Count | None = None
    """Step of that evaluation."""
    rollbacks: Count = 0
    """How often the run has gone back to a checkpoint after too many skipped updates."""
    passed_over: Count = 0
    """Sequences among `samples` that these weights were not trained on, since the run went back and on behind them."""
    history: list[Segment] = field(default_factory=list)
    """What the steps were taken with."""

    def text(self) -> str:
        """The content of `trainer.json`."""
        return json.dumps(asdict(self), indent=1)


def read_state(folder: Path) -> TrainerState:
    """The position that a checkpoint holds. Raises CheckpointError where it cannot be read."""
    try:
        return read_json(folder / STATE_FILE, TrainerState)
    except UNREADABLE as error:
        problem = Problem("checkpoint.state", str(folder / STATE_FILE), f"cannot be read: {why(error)}")
    raise CheckpointError(problem)


def read_plan(folder: Path) -> Plan:
    """The plan that a checkpoint was written under. Raises CheckpointError where it cannot be read."""
    try:
        return read_json(folder / PLAN_FILE, Plan)
    except UNREADABLE as error:
        problem = Problem("checkpoint.plan", str(folder / PLAN_FILE), f"cannot be read: {why(error)}")
    raise CheckpointError(problem)
