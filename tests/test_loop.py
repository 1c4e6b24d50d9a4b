"""What the loop computes, and which data it takes, depends on nothing that is only written down."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from small_plan import small_plan

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.engines.guard import Skipped, SkippedStep
from llmtrain.loop import Run, TooManySkippedError, fit
from llmtrain.metrics import TrainingProgress

SPOILT = range(7, 40)
"""Steps whose updates are skipped."""
WINDOW = 16


class Engine:
    """Skips the updates of some steps."""

    def __init__(self) -> None:
        self.step = 0
        self.guard = SimpleNamespace(read=self._skipped)

    def train_step(self, batch):
        self.step += 1
        return SimpleNamespace(loss=torch.tensor(1.0), grad_norm=torch.tensor(1.0), lr=1e-3)

    def _skipped(self) -> Skipped:
        steps = [step for step in SPOILT if self.step - WINDOW < step <= self.step]
        nan = math.nan
        return Skipped(
            len([step for step in SPOILT if step <= self.step]),
            tuple(SkippedStep(self.step - step, nan, nan, nan, nan) for step in steps),
        )


def _batches(_samples):
    while True:
        yield SimpleNamespace(samples=8, target_tokens=512)


def _found_after(rank: int, **fields) -> tuple[int, list[int]]:
    """The step after which a rank finds that too many were skipped, and the steps that it logged."""
    recipe = small_plan(**{"evaluation.every_steps": 0, "guard.window_steps": WINDOW, **fields}).recipe
    logged: list[int] = []
    metrics = SimpleNamespace(
        log_step=lambda metrics: logged.append(metrics.step) or {"step": metrics.step, "loss": 1.0},
        flush=lambda: None,
    )
    quiet = SimpleNamespace(show=lambda record: None, note=lambda line: None, advance=lambda step: None)
    saver = SimpleNamespace(start=lambda state: None, wait=lambda: None)
    state = TrainerState()
    stop = SimpleNamespace(agreed=lambda step: False, stopped_by=None)
    with TrainingProgress(Console(quiet=True), 100) as progress:
        quiet.busy = progress.busy
        data = SimpleNamespace(train_batches=_batches)
        with pytest.raises(TooManySkippedError):
            fit(Run(recipe, Engine(), data, saver, state, 100, quiet, stop, metrics if rank == 0 else None))
    return state.step, logged


@pytest.mark.parametrize("logging", [1, 3, 7, 1000])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("every", "found"), [(1, 9), (4, 12), (10, 10), (1000, 16)])
def test_when_a_run_goes_back_does_not_depend_on_what_it_logs(logging, rank, every, found):
    """Two may be skipped: the third is that of step 9. It is looked for at least once in a window."""
    fields = {"logging.every_steps": logging, "guard.every_steps": every, "guard.max_skipped": 2}
    step, logged = _found_after(rank, **fields)
    assert step == found
    assert logged == ([step for step in range(1, found + 1) if step % logging == 0] if rank == 0 else [])
