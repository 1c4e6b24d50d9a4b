"""A run that continues with more steps and another batch reports it, and exports its last step."""

import json
import re
import shutil
import socket

import pytest

from llmtrain.checkpoint.contents import read_state
from llmtrain.checkpoint.folder import newest
from tests.helpers.commands import llmtrain, metrics

SIX = ("--set", "train.max_steps=6")
EIGHT = ("--set", "train.max_steps=8", "--set", "batch.global_batch_size=4")


def _exported_step(run_dir) -> int:
    step: int = json.loads((run_dir / "export" / "llmtrain.json").read_text())["step"]
    return step


def _train(small_recipe, run_dir, *arguments: object) -> str:
    result = llmtrain("train", small_recipe, "--run-dir", run_dir, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _work(small_recipe, run_dir, *arguments: object) -> str:
    """As another launcher than ours starts its only worker."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    result = llmtrain("train", small_recipe, "--run-dir", run_dir, *arguments, **alone, MASTER_PORT=str(port))
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def prolonged(small_recipe, tmp_path_factory):
    """The run directory, the export of step 6, and what the longer run said."""
    run_dir = tmp_path_factory.mktemp("prolonged") / "run"
    _work(small_recipe, run_dir, *SIX)
    before = shutil.copytree(run_dir / "export", run_dir.parent / "of step 6")
    return run_dir, before, _train(small_recipe, run_dir, *EIGHT)


@pytest.mark.breadth
def test_an_extended_run_reports_changes_and_exports_its_last_step(prolonged):
    run_dir, before, output = prolonged
    assert json.loads((before / "llmtrain.json").read_text())["step"] == 6
    assert _exported_step(run_dir) == 8
    assert "changed since the start: batch.global_batch_size 8 → 4, train.max_steps 6 → 8\n" in output
    rate = next(line["lr"] for line in metrics(run_dir) if line["step"] == 7)
    assert re.search(rf"learning rate of step 7: {rate:.2e} instead of \S+ with train\.max_steps=6\n", output)
    card = (run_dir / "export" / "README.md").read_text()
    assert "8 sequences, 4 sequences after step 6" in card
    assert f"8 steps, {6 * 8 + 2 * 4} sequences" in card
    checkpoint = newest(run_dir / "checkpoints")
    assert checkpoint
    history = [(one["step"], one["samples"]) for one in json.loads((run_dir / "history.json").read_text())]
    assert history == [(0, 0), (6, 48)]
    assert history == [(one.step, one.samples) for one in read_state(checkpoint).history]


@pytest.mark.breadth
def test_an_extended_run_makes_a_missing_export_and_is_then_finished(small_recipe, prolonged):
    run_dir, before, _ = prolonged
    card = (run_dir / "export" / "README.md").read_text()
    shutil.rmtree(run_dir / "export")
    shutil.copytree(before, run_dir / "export")  # like a run that was killed before its export
    assert "is finished" not in _train(small_recipe, run_dir, *EIGHT)
    assert _exported_step(run_dir) == 8
    assert (run_dir / "export" / "README.md").read_text() == card

    assert f"{run_dir} is finished: 8 steps" in _train(small_recipe, run_dir, *EIGHT)
    assert f"{run_dir} is finished: 8 steps" in _train(small_recipe, run_dir, *SIX, *EIGHT[2:])
    more = ("--set", "train.max_steps=20", "--max-steps", 7, *EIGHT[2:])
    nothing_left = f"{run_dir} has already taken 8 steps, and --max-steps is 7"
    assert nothing_left in _train(small_recipe, run_dir, *more)
    assert nothing_left in _work(small_recipe, run_dir, *more)
