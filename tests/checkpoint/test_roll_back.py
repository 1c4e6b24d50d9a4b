"""The checkpoint to which a run rolls back, and the message if it may not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import read_latest
from llmtrain.checkpoint.resume import choose_newest
from llmtrain.engines.guard import Skipped, SkippedStep
from llmtrain.errors import DivergedError, Exit
from llmtrain.train.rollback import SkippedUpdates, roll_back
from tests.helpers.batches import tiny_recipe
from tests.helpers.small_saves import RUN, Tensors, save, saver_of
from tests.helpers.traces import plan_of


@dataclass
class Counter:
    """A guard that keeps its arguments."""

    total: int = 0

    def count_from(self, total: int) -> None:
        self.total = total


@dataclass
class Engine(Tensors):
    """Loads what `small_saves` wrote."""

    guard: Counter = field(default_factory=Counter)
    step: int = 0


def _saved(folder: Path, *steps: int):
    """A saver that has saved these steps."""
    saver = saver_of(folder)
    for step in steps:
        save(saver, step)
    return saver


def _skipped_updates(first: int, last: int, rollbacks: int = 0, **fields) -> SkippedUpdates:
    """Every step from the first to the last one was skipped."""
    steps = tuple(SkippedStep(last - step, math.nan, 1.0, math.nan, math.nan) for step in range(first, last + 1))
    state = TrainerState(step=last, samples=8 * last, data="key", rollbacks=rollbacks)
    return SkippedUpdates(plan_of(tiny_recipe(**fields), 1), state, Skipped(len(steps), steps))


def _roll_back(skipped: SkippedUpdates, saver) -> Engine:
    engine = Engine()
    roll_back(skipped, engine, saver.checkpoints, RUN, saver.storage)
    return engine


@pytest.mark.parametrize(("before", "step"), [(13, 12), (12, 8), (9, 8), (8, 4), (4, None)])
def test_a_checkpoint_from_before_a_step_is_one_of_an_earlier_step(tmp_path, before, step):
    saver = _saved(tmp_path, 4, 8, 12)
    choice = choose_newest(tmp_path, RUN, saver.storage, before=before)
    assert (choice and choice.manifests[0].step) == step


def test_a_run_rolls_back_to_before_the_first_skipped_step_and_skips_the_data(tmp_path):
    saver = _saved(tmp_path, 4, 8)  # the last one lies among the skipped steps
    skipped = _skipped_updates(7, 10)
    engine = _roll_back(skipped, saver)
    assert engine.step == 4
    assert (skipped.state.step, skipped.state.samples, skipped.state.rollbacks) == (4, 80, 1)
    assert engine.guard.total == 4
    assert read_latest(tmp_path)[0] == "step_00000004"


def test_a_later_checkpoint_is_used_if_no_earlier_one_was_kept(tmp_path):
    saver = _saved(tmp_path, 8)
    assert _roll_back(_skipped_updates(7, 10), saver).step == 8


@pytest.mark.parametrize(
    ("rollbacks", "fields", "saved", "told"),
    [
        (0, {"guard.then": "stop"}, (4,), "the same command continues from step_00000004"),
        (3, {}, (4,), r"no rollback is left \(3 of 3\)"),
        (0, {}, (), "no checkpoint was saved to roll back to"),
    ],
)
def test_a_run_stops_if_it_may_not_roll_back(tmp_path, rollbacks, fields, saved, told):
    skipped = _skipped_updates(7, 16, rollbacks, **fields)
    with pytest.raises(DivergedError, match=told) as refused:
        _roll_back(skipped, _saved(tmp_path, *saved))
    assert refused.value.exit_code == Exit.WORKER
    message = str(refused.value)
    assert "10 of the last 128 updates were skipped, more than 8" in message
    assert "first step 7 (loss not finite), last step 16 (loss not finite)" in message
    assert "[guard.skipped]" in message
    assert skipped.state.step == 16
