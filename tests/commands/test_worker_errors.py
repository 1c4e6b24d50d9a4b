"""Errors that a worker of another launcher finds before it meets the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.commands.train import train_here
from llmtrain.commands.train_request import TrainRequest
from llmtrain.errors import CheckpointError, Exit
from llmtrain.launch import Rank
from llmtrain.train import signals

RECIPE = str(Path(__file__).parents[2] / "recipes/tiny.py")


def test_the_first_rank_of_each_machine_says_what_is_wrong_there(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "StopSignals", lambda: None)
    request = TrainRequest(recipe=RECIPE, run_dir=tmp_path, resume=str(tmp_path / "on_another_disk"))
    with pytest.raises(CheckpointError, match="on_another_disk is not a checkpoint folder"):
        train_here(request, Rank(2, 0, 4, 2, "node-1", 29500, "torchrun"))
    with pytest.raises(SystemExit) as silent:
        train_here(request, Rank(3, 1, 4, 2, "node-1", 29500, "torchrun"))
    assert silent.value.code == Exit.CHECKPOINT
