"""A run that goes on with more steps and another batch says so, and its export is of its last step."""

import json
import shutil
import socket

import pytest

from llmtrain.checkpoint.contents import read_state
from llmtrain.checkpoint.folder import newest
from tests.helpers.commands import llmtrain, metrics

SIX = ("--set", "train.max_steps=6")
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""What a launcher tells its only worker."""
EIGHT = ("--set", "train.max_steps=8", "--set", "batch.global_batch_size=4")


def _exported_step(run_dir) -> int:
    step: int = json.loads((run_dir / "export" / "llmtrain.json").read_text())["step"]
    return step


@pytest.mark.breadth
def test_a_prolonged_run_says_what_changed_and_exports_its_last_step(small_recipe, tmp_path):
    run_dir = tmp_path / "run"

    def train(*arguments: object) -> str:
        result = llmtrain("train", small_recipe, "--run-dir", run_dir, *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def worker(*arguments: object) -> str:
        """As another launcher than ours starts it."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        result = llmtrain("train", small_recipe, "--run-dir", run_dir, *arguments, **ALONE, MASTER_PORT=str(port))
        assert result.returncode == 0, result.stderr
        return result.stdout

    train(*SIX)
    assert _exported_step(run_dir) == 6
    shutil.copytree(run_dir / "export", tmp_path / "of step 6")

    output = train(*EIGHT)
    assert "changed since the start: batch.global_batch_size 8 → 4, train.max_steps 6 → 8\n" in output
    rate = next(line["lr"] for line in metrics(run_dir) if line["step"] == 7)
    assert f"learning rate of step 7: {rate:.2e}, which train.max_steps=6 made" in output
    card = (run_dir / "export" / "README.md").read_text()
    assert "8 sequences, 4 sequences after step 6" in card
    assert f"8 steps, {6 * 8 + 2 * 4} sequences" in card
    checkpoint = newest(run_dir / "checkpoints")
    assert checkpoint
    history = [(one["step"], one["samples"]) for one in json.loads((run_dir / "history.json").read_text())]
    assert history == [(0, 0), (6, 48)]
    assert history == [(one.step, one.samples) for one in read_state(checkpoint).history]

    # As if it had been killed before its export.
    shutil.rmtree(run_dir / "export")
    (tmp_path / "of step 6").rename(run_dir / "export")
    assert "is finished" not in train(*EIGHT)
    assert _exported_step(run_dir) == 8
    assert (run_dir / "export" / "README.md").read_text() == card

    assert f"{run_dir} is finished: 8 steps" in train(*EIGHT)
    assert f"{run_dir} is finished: 8 steps" in train("--set", "train.max_steps=6", *EIGHT[2:])
    more = ("--set", "train.max_steps=20", "--max-steps", 7, *EIGHT[2:])
    nothing_left = f"{run_dir} has already taken 8 steps, and --max-steps is 7"
    assert nothing_left in train(*more)
    assert nothing_left in worker(*more)
