"""Training continues while a checkpoint is written, and the checkpoint has the state of the step at which it began."""

from __future__ import annotations

import os
from threading import Event, Thread

import pytest

from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import newest, read_latest, readable
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.errors import CheckpointError
from llmtrain.plan.predict.flat import optimizer_groups
from llmtrain.plan.predict.memory import memory_of
from tests.helpers.batches import GLOBAL_BATCH, step_batch, tiny_recipe
from tests.helpers.faults import Faults, injected
from tests.helpers.harness import run_ranks
from tests.helpers.small_saves import RUN, save, saver_of
from tests.helpers.traces import engine_of, plan_of

SECONDS = 60


@pytest.fixture
def held_disk(monkeypatch):
    """A disk on which nothing is safe before the event is set."""
    released, flushed = Event(), os.fsync

    def slow(descriptor):
        assert released.wait(SECONDS)
        flushed(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    yield released
    released.set()


def _start(saver, step):
    saver.engine.step = step
    saver.start(TrainerState(step=step, samples=8 * step, data="key"))


def test_training_continues_before_the_save_is_on_disk(tmp_path, held_disk):
    saver = saver_of(tmp_path)
    _start(saver, 1)
    saver.engine.step = 2  # the engine trains on
    assert read_latest(tmp_path)[0] is None
    held_disk.set()
    saver.wait()
    load(newest(tmp_path), saver.engine, saver.plan, "key")
    assert saver.engine.step == 1


def test_a_save_waits_for_the_save_before(tmp_path, held_disk):
    saver = saver_of(tmp_path)
    _start(saver, 1)
    second = Thread(target=_start, args=(saver, 2))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # waits for the first
    assert not readable(tmp_path)
    held_disk.set()
    second.join(SECONDS)
    assert "step_00000001" in [path.name for path in readable(tmp_path)]
    saver.wait()
    assert read_latest(tmp_path)[0] == "step_00000002"


def test_a_step_of_another_size_fits(tmp_path):
    saver = saver_of(tmp_path)
    for step, elements in ((1, 1000), (2, 10), (3, 5000)):
        saver.engine.elements = elements
        verify_checkpoint(save(saver, step))
        load(newest(tmp_path), saver.engine, saver.plan, "key")
        assert saver.engine.step == step


def test_a_failed_write_is_reported_and_retried(tmp_path):
    said: list[str] = []
    saver = saver_of(tmp_path)
    saver.warn, saver.pauses = said.append, (0.0, 0.0)
    with injected(Faults(5, "full")):
        save(saver, 1)
    assert read_latest(tmp_path)[0] == "step_00000001"
    assert len(said) == 1
    assert "No space left" in said[0]
    assert "trying again" in said[0]


def test_a_permanent_failure_is_reported_and_loses_one_save(tmp_path, monkeypatch):
    said: list[str] = []
    saver = saver_of(tmp_path)
    saver.warn = said.append
    save(saver, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", _full)
        _start(saver, 2)
        saver.settle()
    assert "the checkpoint of step 2 was not written" in said[0]
    assert "step_00000001 is the last complete checkpoint" in said[0]
    _start(saver, 3)  # the run has gone on
    saver.wait()
    assert read_latest(tmp_path)[0] == "step_00000003"


def test_the_last_save_of_a_run_must_succeed(tmp_path, monkeypatch):
    saver = saver_of(tmp_path)
    saver.warn = lambda _: None
    monkeypatch.setattr(os, "mkdir", _full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(saver, 1)


def _full(*_):
    raise OSError(28, "No space left on device", "injected")


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"parallel.zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param({"parallel.zero_stage": 3, "parallel.precision": "bf16"}, marks=pytest.mark.breadth),
    ],
)
def test_a_background_save_equals_a_foreground_save(fields, tmp_path):
    run_ranks(2, _beside_training, tmp_path, fields)


def _beside_training(rank, folder, fields):
    """Saves after each step, while the ranks train on, over the same network."""
    files = []
    for background in (True, False):
        recipe = tiny_recipe(**fields, **{"checkpoint.background": background})
        plan = plan_of(recipe, 2)
        engine = engine_of(plan)
        saver = Saver(folder / str(background), plan, engine, RUN)
        for step in range(1, 6):
            engine.train_step(step_batch(step, 1, GLOBAL_BATCH // 2, rank, 2))
            saver.start(TrainerState(step=step, samples=step * GLOBAL_BATCH, data="key"))
        saver.wait()
        saved = [verify_checkpoint(path)[0].files for path in readable(saver.checkpoints)]
        assert len(saved) == 5
        if background:
            _is_as_large_as_planned(plan, newest(saver.checkpoints))
        files.append([{name: file for name, file in one.items() if name != "plan.json"} for one in saved])
    assert files[0] == files[1]


def _is_as_large_as_planned(plan, checkpoint):
    """Padding aside: fewer elements than ranks for each parameter (ZeRO-3), twice the ranks for a group (ZeRO-1)."""
    planned = memory_of(plan).summary()["host_copy_bytes_per_rank"]
    ranks, parameters = (
        plan.data_parallel_size,
        sum(len(one.sizes) for one in optimizer_groups(plan, plan.model.weights, 0)),
    )
    for rank in range(ranks):
        saved = sum(_tensor_bytes(path) for path in checkpoint.glob(f"engine/rank_{rank:05d}.*"))
        assert abs(saved - planned) <= 12 * 2 * ranks * parameters


def _tensor_bytes(path):
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
