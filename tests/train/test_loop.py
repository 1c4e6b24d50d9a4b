"""Results and data of the loop do not depend on logging."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.engines import StepResult
from llmtrain.engines.guard import Skipped, SkippedStep
from llmtrain.train.loop import Run, TooManySkippedError, fit
from llmtrain.train.metrics import Evaluation, TrainingProgress
from tests.helpers.small_plan import MODEL, small_plan

SPOILT = range(7, 40)
"""Steps whose updates are skipped."""
WINDOW = 16
PRETRAINED = {"model.architecture": None, "model.config": {}, "model.pretrained": "a folder of weights"}


class Engine:
    """Skips the updates of some steps."""

    objective = own_metrics = None

    def metric_sums(self) -> None:
        """Has none, as an engine whose loss is a mean over tokens."""

    def __init__(self) -> None:
        self.step = 0
        self.guard = SimpleNamespace(read=self._skipped)

    def train_step(self, batch, change_gradients=None):
        self.step += 1
        return StepResult(loss=torch.tensor(1.0), grad_norm=torch.tensor(1.0), lr=1e-3)

    def _skipped(self) -> Skipped:
        steps = [step for step in SPOILT if self.step - WINDOW < step <= self.step]
        nan = math.nan
        return Skipped(
            len([step for step in SPOILT if step <= self.step]),
            tuple(SkippedStep(self.step - step, nan, nan, nan, nan) for step in steps),
        )


def _batches(_samples):
    while True:
        yield SimpleNamespace(samples=8, target_tokens=512, num_items=512)


def _found_after(rank: int, **fields) -> tuple[int, list[int]]:
    """The step after which a rank finds that too many were skipped, and the steps that it logged."""
    recipe = small_plan(**{"evaluation.every_steps": 0, "guard.window_steps": WINDOW, **fields}).recipe
    logged: list[int] = []
    metrics = SimpleNamespace(
        step_record=lambda metrics: {"step": metrics.step},
        log=lambda record: logged.append(record["step"]),
        log_event=lambda event, step, text: None,
        flush=lambda: None,
    )
    quiet = SimpleNamespace(show=lambda record: None, note=lambda line: None, advance=lambda step: None)
    saver = SimpleNamespace(start=lambda state: None, wait=lambda: None)
    state = TrainerState()
    stop = SimpleNamespace(should_stop=lambda step: False, stopped_by=None)
    with TrainingProgress(Console(quiet=True), 100) as progress:
        quiet.busy = progress.busy
        data = SimpleNamespace(train_batches=_batches)
        with pytest.raises(TooManySkippedError):
            fit(Run(recipe, Engine(), data, saver, state, 100, quiet, stop, metrics if rank == 0 else None))
    return state.step, logged


@pytest.mark.parametrize("logging", [1, 3, 7, 1000])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("every", "found"), [(1, 9), (4, 12), (10, 10), (1000, 16)])
def test_rollbacks_do_not_depend_on_logging(logging, rank, every, found):
    """Two may be skipped: the third is that of step 9. It is looked for at least once in a window."""
    fields = {"logging.every_steps": logging, "guard.every_steps": every, "guard.max_skipped": 2}
    step, logged = _found_after(rank, **fields)
    assert step == found
    assert logged == ([step for step in range(1, found + 1) if step % logging == 0] if rank == 0 else [])


class Evaluated:
    """Evaluates batches whose loss is known."""

    objective = own_metrics = None

    def metric_sums(self) -> None:
        """Has none."""

    def __init__(self) -> None:
        self.steps = 0

    def train_step(self, batch, change_gradients=None):
        self.steps += 1
        return StepResult(loss=torch.tensor(1.0), grad_norm=torch.tensor(1.0), lr=1e-3)

    def eval_step(self, batch):
        return torch.tensor(batch.loss - self.steps)

    def averaged(self):
        return nullcontext()


def _evaluations(start: int, **fields) -> list[tuple]:
    """What a run of three steps after `start` logs of its evaluations."""
    recipe = small_plan(**{"train.max_steps": start + 3, **fields}).recipe
    logged: list[tuple] = []
    metrics = SimpleNamespace(
        step_record=lambda metrics: {},
        eval_record=lambda *values: logged.append(values) or {},
        log=lambda record: None,
        log_event=lambda event, step, text: None,
        flush=lambda: None,
    )
    of = [("web", 9.0, 10), ("web", 5.0, 30), ("code", 4.0, 60)]
    batches = [SimpleNamespace(eval_source=name, loss=loss, num_items=tokens) for name, loss, tokens in of]
    data = SimpleNamespace(
        train_batches=_batches,
        eval_sets=["", "late"],
        eval_batches=lambda most, name: iter(batches[-1:] if name else batches),
        eval_bytes=lambda most, name: 400,
    )
    quiet = SimpleNamespace(**dict.fromkeys(("show", "note", "advance"), lambda _: None))
    saver = SimpleNamespace(start=lambda state: None, wait=lambda: None)
    stop = SimpleNamespace(should_stop=lambda step: False, stopped_by=None)
    engine = Evaluated()
    engine.guard = SimpleNamespace(read=lambda: Skipped(0, ()))
    with TrainingProgress(Console(quiet=True), 100) as progress:
        quiet.busy = progress.busy
        fit(Run(recipe, engine, data, saver, TrainerState(step=start), start + 3, quiet, stop, metrics))
    return logged


def test_an_evaluation_is_a_mean_over_tokens_of_all_and_of_each_source():
    (logged,) = _evaluations(0, **{"evaluation.every_steps": 50})
    main = Evaluation((6 * 10 + 2 * 30 + 1 * 60) / 100, {"web": 6.0 - 3, "code": 4.0 - 3}, None, 400 / 100)
    assert logged == (3, main, {"late": Evaluation(1.0, {"code": 1.0}, None, 400 / 60)})


@pytest.mark.parametrize(
    ("start", "fields", "steps"),
    [
        (0, {"evaluation.every_steps": 2}, [2, 3]),
        (0, {"evaluation.every_steps": 2, "evaluation.at_start": True}, [0, 2, 3]),
        (4, {"evaluation.every_steps": 2, "evaluation.at_start": True}, [6, 7]),
        (0, {"evaluation.every_steps": 2, **PRETRAINED}, [0, 2, 3]),
        (0, {"evaluation.every_steps": 2, "evaluation.at_start": False, **PRETRAINED}, [2, 3]),
        (0, {"evaluation.every_steps": 0, **PRETRAINED}, []),
    ],
)
def test_a_pretrained_model_is_evaluated_before_the_first_step(start, fields, steps, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **MODEL}))
    if "model.pretrained" in fields:
        fields = {**fields, "model.pretrained": str(tmp_path)}
    assert [step for step, *_ in _evaluations(start, **fields)] == steps
