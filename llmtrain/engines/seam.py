"""The seam between the loop and what runs a step.

It is one whole optimizer step, because a pipeline engine offers nothing lower: there, forward and
backward passes of several micro-batches are interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from llmtrain.data import StepBatch
from llmtrain.engines.guard import Guard
from llmtrain.engines.writer import Writer


@dataclass(frozen=True)
class StepResult:
    """What a step tells; still on the device, so that a loop that does not log never waits for it."""

    loss: Tensor
    """Mean cross-entropy over the target tokens of the global batch, in nats; a scalar, equal on all ranks."""
    grad_norm: Tensor
    """2-norm of the whole gradient before clipping; a scalar, equal on all ranks."""
    lr: float
    """Learning rate that the step was taken with."""


class Engine(Protocol):
    """One optimizer step of a plan. Every method is called by all ranks together."""

    @property
    def guard(self) -> Guard:
        """Which updates were not taken."""

    @property
    def data_parallel_rank(self) -> int:
        """Which replica this rank belongs to, and so which samples it reads."""

    def train_step(self, batch: StepBatch) -> StepResult:
        """Forward and backward over this rank's micro-batches, and one update, if the guard allows it."""

    def eval_step(self, batch: StepBatch) -> Tensor:
        """Mean cross-entropy over the target tokens of the global batch, without gradients; a scalar."""

    def save(self, writer: Writer) -> None:
        """Gives weights, optimizer and schedule to `writer`, each rank its part."""

    def load(self, folder: Path) -> None:
        """Reads what `save` of any engine wrote, under any plan of the same model."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole and on the CPU, under its Hugging Face name; tied weights once."""

    def describe(self) -> dict[str, Any]:
        """What the engine really runs with, for the run's record."""
