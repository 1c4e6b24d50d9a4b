"""A checkpoint is complete or absent, and only the run's own checkpoints are deleted, as the recipe says."""

from __future__ import annotations

import json
import math

import pytest

from llmtrain.checkpoint import folder
from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.manifest import read_manifests
from llmtrain.commands.checkpoint import best_checkpoint
from llmtrain.errors import CheckpointError
from tests.helpers.small_saves import save, saver_of


def _names(checkpoints):
    return sorted(path.name for path in checkpoints.iterdir())


def test_a_published_checkpoint_is_complete_and_the_newest(tmp_path):
    made = save(saver_of(tmp_path), 5)
    (manifest,) = verify_checkpoint(made)
    assert folder.newest(tmp_path) == made
    assert (tmp_path / "latest").read_text() == "step_00000005\n"
    assert _names(tmp_path) == ["latest", "step_00000005"]
    # All that is there, and the manifest.
    files = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert files == {*manifest.files, "MANIFEST.json"}
    assert (manifest.step, manifest.samples, manifest.run, manifest.world_size) == (5, 40, "small", 1)


def test_a_half_made_checkpoint_is_never_found(tmp_path):
    made = save(saver_of(tmp_path), 5)
    builder = folder.CheckpointBuilder(tmp_path, 6, "small")
    builder.start()
    (builder.folder / "engine").mkdir()
    assert folder.readable(tmp_path) == [made]
    unfinished = folder.step_folder(tmp_path, 7)
    unfinished.mkdir()
    assert folder.newest(tmp_path) == made
    with pytest.raises(CheckpointError, match="incomplete"):
        verify_checkpoint(unfinished)


def test_a_dangling_latest_falls_back_to_the_newest(tmp_path):
    made = save(saver_of(tmp_path), 5)
    (tmp_path / "latest").write_text("step_00000099\n")
    assert folder.newest(tmp_path) == made


def test_an_unreadable_manifest_is_reported(tmp_path):
    made = save(saver_of(tmp_path), 5)
    whole = json.loads((made / "MANIFEST.json").read_text())
    for text in ("", "{", "[]", json.dumps({"files": 3}), json.dumps({**whole, "schema_version": 2})):
        (made / "MANIFEST.json").write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_manifests(made)


def test_a_save_removes_only_the_leftovers_of_killed_saves(tmp_path):
    for name in (
        ".step_00000001.view-0123abcd",
        ".step_00000003.partial-small",
        ".step_00000002.deleted-small",
        ".step_00000003.partial-other",
        "mine",
    ):
        (tmp_path / name).mkdir()
    for name in (".probe-0123abcd-17", ".latest.x1_y2"):
        (tmp_path / name).touch()
    save(saver_of(tmp_path), 5)
    assert _names(tmp_path) == [".step_00000003.partial-other", "latest", "mine", "step_00000005"]


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path):
    saver = saver_of(tmp_path)
    first = verify_checkpoint(save(saver, 5))[0].save
    save(saver, 4)
    assert verify_checkpoint(save(saver, 5))[0].save != first
    assert _names(tmp_path) == ["latest", "step_00000004", "step_00000005"]


def test_a_foreign_folder_is_not_replaced(tmp_path):
    save(saver_of(tmp_path, run="other"), 5)
    save(saver_of(tmp_path), 5)
    (kept,) = tmp_path.glob("step_00000005.replaced-*")
    assert verify_checkpoint(kept)[0].run == "other"
    assert folder.readable(tmp_path) == [tmp_path / "step_00000005"]


def test_old_checkpoints_are_removed_and_nothing_else(tmp_path):
    (tmp_path / "step_00000000_mine").mkdir(parents=True)
    (tmp_path / "step_00000000").mkdir()
    save(saver_of(tmp_path, run="other"), 9)
    saver = saver_of(tmp_path, **{"checkpoint.keep_last": 2})
    for step in (1, 2, 3):
        save(saver, step)
    # No manifest, and the manifest of another run: not ours.
    kept = ["step_00000000", "step_00000000_mine", "step_00000002", "step_00000003", "step_00000009"]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == kept


def test_a_run_that_rolled_back_keeps_its_new_checkpoints(tmp_path):
    saver = saver_of(tmp_path, **{"checkpoint.keep_last": 2})
    for step in (100, 200, 300, 150):
        made = save(saver, step)
    assert {path.name for path in folder.readable(tmp_path)} == {"step_00000300", "step_00000150"}
    assert folder.newest(tmp_path) == made


def test_milestones_and_the_best_are_kept(tmp_path):
    policy = {"checkpoint.keep_last": 1, "checkpoint.keep_every_steps": 4, "checkpoint.keep_best": 2}
    saver = saver_of(tmp_path, **policy, **{"checkpoint.every_steps": 1, "evaluation.every_steps": 1})
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 1.5, 6: None, 7: 9.0}
    for step, loss in losses.items():
        save(saver, step, loss)
    assert [int(path.name[5:]) for path in folder.readable(tmp_path)] == [2, 4, 5, 7]


def test_the_best_are_those_by_the_metric_of_the_recipe(tmp_path):
    policy = {"checkpoint.keep_last": 1, "checkpoint.keep_best": 2, "checkpoint.best_mode": "max"}
    policy |= {"checkpoint.best_metric": "bits_per_byte", "evaluation.every_steps": 1, "checkpoint.every_steps": 1}
    saver = saver_of(tmp_path / "checkpoints", **policy)
    for step, score in {1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan, 5: 1.5}.items():
        save(saver, step, 1.0, bits_per_byte=score if math.isfinite(score) else None)
    assert [int(path.name[5:]) for path in folder.readable(tmp_path / "checkpoints")] == [1, 3, 5]
    assert best_checkpoint(tmp_path).name == "step_00000001"


def test_the_best_of_checkpoints_without_an_evaluation_is_refused(tmp_path):
    made = save(saver_of(tmp_path / "checkpoints"), 1)
    with pytest.raises(CheckpointError, match="an evaluation after the same step that has eval_loss"):
        best_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is one checkpoint"):
        best_checkpoint(made)


def test_a_failed_deletion_loses_nothing(tmp_path, capsys, monkeypatch):
    saver = saver_of(tmp_path, **{"checkpoint.keep_last": 1})
    save(saver, 1)

    def stuck(*_):
        raise PermissionError(13, "Permission denied", "x")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "rename", lambda old, new: stuck() if "deleted" in new.name else old.rename(new))
        save(saver, 2)
    assert "cannot delete an old checkpoint: Permission denied" in capsys.readouterr().out
    assert [path.name for path in folder.readable(tmp_path)] == ["step_00000001", "step_00000002"]
    save(saver, 3)
    assert [path.name for path in folder.readable(tmp_path)] == ["step_00000003"]


def test_only_a_folder_is_replaced_by_a_new_one(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(CheckpointError, match="is not a folder"), folder.new_folder(tmp_path / name, replace=True):
            raise AssertionError
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "link"]


def test_what_killed_commands_left_is_taken_over(tmp_path):
    (tmp_path / ".out.partial").write_text("a file in the place of the folder")
    with folder.new_folder(tmp_path / "out") as new:
        (new / "file").touch()
    (tmp_path / ".out-abcdefgh").mkdir()
    (tmp_path / ".out-other").mkdir()
    with folder.scratch_folder(tmp_path, "out") as first, folder.scratch_folder(tmp_path, "out") as second:
        assert _names(tmp_path) == sorted([first.name, second.name, ".out-other", "out"])
    assert _names(tmp_path) == [".out-other", "out"]
