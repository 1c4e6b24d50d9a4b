"""The values that a run was trained with, by step, and their description in the model card."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from llmtrain.checkpoint.contents import Segment, TrainerState, changed_values, read_state, values_by_step, with_plan
from llmtrain.checkpoint.folder import STATE_FILE, is_exported, new_folder, write_exported
from llmtrain.checkpoint.hub.model_card import model_card
from llmtrain.checkpoint.manifest import Manifest
from llmtrain.engines.optim import rate_of
from llmtrain.run_dir import MAY_CHANGE_IF_ALLOWED
from tests.helpers.batches import tiny_recipe
from tests.helpers.traces import plan_of

BATCH = "batch.global_batch_size"
MANIFEST = Manifest(
    **{"save": "a", "part": 0, "hosts": ["here"], "run": "r", "recipe": "d", "step": 8, "samples": 56},
    **{"eval_loss": None, "written": "", "world_size": 1, "layout": {}, "versions": {}, "files": {}},
)


def _plan(**fields):
    return plan_of(tiny_recipe(**{"train.max_steps": 6, "batch.micro_batch_size": 1, **fields}), 1)


def _history(*starts) -> list[Segment]:
    """starts: step, samples, fields."""
    history: list[Segment] = []
    for step, samples, fields in starts:
        history = with_plan(history, step, samples, _plan(**fields))
    return history


def test_an_unchanged_run_has_one_segment():
    history = _history((0, 0, {}), (4, 32, {}), (5, 40, {}))
    assert [(one.step, one.samples) for one in history] == [(0, 0)]


def test_a_change_starts_another_segment():
    history = _history((0, 0, {BATCH: 8}), (4, 32, {BATCH: 4}), (6, 40, {BATCH: 4, "train.max_steps": 9}))
    assert [(one.step, one.samples) for one in history] == [(0, 0), (4, 32), (6, 40)]
    assert changed_values(history[0].values, history[-1].values) == [f"{BATCH} 8 → 4", "train.max_steps 6 → 9"]
    assert values_by_step(history, BATCH) == [(0, 8), (4, 4)]
    assert values_by_step(history, "train.max_steps") == [(0, 6), (6, 9)]


def test_a_change_at_the_users_request_is_recorded():
    history = _history((0, 0, {}), (4, 32, {"optim.lr": 0.5}))
    assert [value for _, value in values_by_step(history, "optim.lr")] == [tiny_recipe().optim.lr, 0.5]
    values = {name: one for name, one in history[0].values.items() if not MAY_CHANGE_IF_ALLOWED.fullmatch(name)}
    old = Segment(0, 0, values)
    assert with_plan([old], 4, 32, _plan()) == [old]  # written before such changes were possible


def test_a_change_without_a_step_leaves_no_segment():
    history = _history((0, 0, {BATCH: 8}), (4, 32, {BATCH: 4}), (4, 32, {BATCH: 2}))
    assert values_by_step(history, BATCH) == [(0, 8), (4, 2)]


def test_a_written_history_is_read_back(tmp_path):
    state = TrainerState(step=6, samples=40, history=_history((0, 0, {BATCH: 8}), (4, 32, {BATCH: 4})))
    (tmp_path / STATE_FILE).write_text(json.dumps(asdict(state)))
    assert read_state(tmp_path) == state


def test_the_card_shows_the_values_of_each_segment(tmp_path):
    plan = _plan(**{BATCH: 4, "train.max_steps": 9, "data.cache_dir": "/home/somebody/cache"})
    history = with_plan(_history((0, 0, {BATCH: 8})), 6, 48, plan)
    state = TrainerState(step=8, samples=80, tokens=5600, passed_over=24, rollbacks=1, history=history)
    card = model_card(plan, state, MANIFEST, "float32", tmp_path / "metrics.jsonl")
    assert "| global batch | 8 sequences, 4 sequences after step 6 |" in card
    assert "| trained | 8 steps, 56 sequences (24 more were skipped), 5,600 target tokens |" in card
    assert f"- after step 6: data.cache_dir none → cache, {BATCH} 8 → 4, train.max_steps 6 → 9" in card
    assert "## Recipe after step 6" in card
    assert "somebody" not in card


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_the_rate_of_a_step_is_that_of_the_schedule(schedule):
    recipe = tiny_recipe(**{"optim.schedule": schedule, "train.max_steps": 12, "optim.warmup_steps": 3})
    if schedule == "wsd":
        recipe = recipe.with_(**{"optim.decay_steps": 4})
    rates = [rate_of(recipe, step) for step in range(1, 13)]
    assert rates[0] == 0
    assert rates[3] == recipe.optim.lr
    assert (rates[-1] < rates[3]) == (schedule != "constant")


def test_an_export_is_of_one_save(tmp_path):
    write_exported(tmp_path, MANIFEST)
    assert is_exported(tmp_path, MANIFEST)
    assert not is_exported(tmp_path, MANIFEST.model_copy(update={"save": "b"}))  # of the same step


@pytest.mark.parametrize("content", ["", "[]", "{}", "{", "null", '{"save": ["a"]}', "\ud800"])
def test_an_export_without_a_save_identity_belongs_to_no_save(tmp_path, content):
    (tmp_path / "llmtrain.json").write_text(content, errors="surrogatepass")
    assert not is_exported(tmp_path, MANIFEST)
    assert not is_exported(tmp_path / "nowhere", MANIFEST)


class KilledError(Exception):
    """In place of SIGKILL: nothing that comes after is done."""


@pytest.mark.parametrize("call", range(1, 30))
def test_a_folder_that_is_replaced_is_always_complete_or_absent(tmp_path, monkeypatch, call):
    """It is killed before one call after the other that changes the disk."""
    out = tmp_path / "export"
    out.mkdir()
    for name in "ab":
        (out / name).write_text("old")
    left = call

    def killed(original):
        def act(*arguments, **options):
            nonlocal left
            left -= 1
            if left <= 0:
                raise KilledError
            return original(*arguments, **options)

        return act

    for name in ("unlink", "rmdir", "rename", "mkdir"):
        monkeypatch.setattr(os, name, killed(getattr(os, name)))
    with suppress(KilledError), new_folder(out, replace=True) as folder:
        for name in "ab":
            (folder / name).write_text("new")
    monkeypatch.undo()
    found = sorted((path.name, path.read_text()) for path in out.iterdir()) if out.exists() else None
    assert found in (None, [("a", "old"), ("b", "old")], [("a", "new"), ("b", "new")])
    with new_folder(out, replace=True) as folder:
        (folder / "c").write_text("newest")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert [path.name for path in Path(out).iterdir()] == ["c"]
