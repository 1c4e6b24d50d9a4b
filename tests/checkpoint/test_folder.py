"""A checkpoint is whole, or it is not there, or it says what is wrong with it."""

from __future__ import annotations

import json
import pickle
import zipfile

import pytest
import torch

from llmtrain.checkpoint import folder
from llmtrain.checkpoint.pickles import check_pickles
from llmtrain.errors import CheckpointError, Exit


def _checkpoint(checkpoints, step: int = 5):
    temporary = folder.temporary_folder(checkpoints, step)
    (temporary / "engine").mkdir(parents=True)
    torch.save({"module": torch.arange(10)}, temporary / "engine" / "model.pt")
    (temporary / "trainer.json").write_text("{}")
    return folder.publish(temporary, step)


def test_a_published_checkpoint_is_whole_and_the_newest(tmp_path):
    made = _checkpoint(tmp_path)
    folder.verify(made)
    assert made.name == "step_00000005"
    assert folder.newest(tmp_path) == made
    assert (tmp_path / "latest").read_text() == "step_00000005\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000005"]


def test_a_half_made_checkpoint_is_never_found(tmp_path):
    made = _checkpoint(tmp_path)
    (folder.temporary_folder(tmp_path, 6) / "engine").mkdir(parents=True)
    unfinished = folder.step_folder(tmp_path, 7)
    unfinished.mkdir()
    assert folder.newest(tmp_path) == made
    with pytest.raises(CheckpointError, match="never finished"):
        folder.verify(unfinished)


def test_latest_that_names_nothing_falls_back_on_the_newest(tmp_path):
    made = _checkpoint(tmp_path)
    (tmp_path / "latest").write_text("step_00000099\n")
    assert folder.newest(tmp_path) == made


@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damage_is_named_by_file(tmp_path, damage):
    made = _checkpoint(tmp_path)
    file = made / "engine" / "model.pt"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    with pytest.raises(CheckpointError) as raised:
        folder.verify(made)
    assert "engine/model.pt" in str(raised.value)
    assert raised.value.exit_code == Exit.CHECKPOINT


def test_a_damaged_manifest_is_a_message(tmp_path):
    made = _checkpoint(tmp_path)
    for text in ("", "{", "[]", json.dumps({"files": 3})):
        (made / folder.MANIFEST).write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read"):
            folder.verify(made)


def test_old_checkpoints_are_removed_and_nothing_else(tmp_path):
    for step in (1, 2, 3):
        _checkpoint(tmp_path, step)
    (tmp_path / "step_00000000_mine").mkdir()
    folder.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [
        "step_00000000_mine",
        "step_00000002",
        "step_00000003",
    ]


def test_a_run_that_went_back_keeps_what_it_writes_now(tmp_path):
    for step in (100, 200, 300, 150):
        made = _checkpoint(tmp_path, step)
    folder.prune(tmp_path, 2)
    assert {path.name for path in folder.whole(tmp_path)} == {"step_00000300", "step_00000150"}
    assert folder.newest(tmp_path) == made


class _Canary:
    def __reduce__(self):
        return (open, ("/nonexistent/canary", "w"))


def test_a_pickle_that_would_run_something_is_refused(tmp_path):
    torch.save({"state": torch.ones(2), "bad": _Canary()}, tmp_path / "shard.pt")
    with pytest.raises(CheckpointError, match="open"):
        check_pickles(tmp_path)


def test_a_file_that_is_no_checkpoint_is_a_message(tmp_path):
    (tmp_path / "shard.pt").write_bytes(b"\x80\x04nonsense")
    with pytest.raises(CheckpointError, match=r"shard\.pt"):
        check_pickles(tmp_path)


def test_the_legacy_format_is_refused(tmp_path):
    """A bare pickle is not looked into by torch's scanner, so it does not pass."""
    (tmp_path / "shard.pt").write_bytes(pickle.dumps({"a": 1}))
    assert not zipfile.is_zipfile(tmp_path / "shard.pt")
    with pytest.raises(CheckpointError):
        check_pickles(tmp_path)
