"""The backend `horovod` under our launchers and its own."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.commands import llmtrain, losses, run

HOROVOD = ("--set", "parallel.backend=horovod")
BIN = Path(sys.executable).parent
COMMANDS = {
    "local": [sys.executable, "-m", "llmtrain", "train", "{recipe}", "--nproc", "2"],
    "torchrun": [BIN / "torchrun", "--nproc_per_node", "2", "{recipe}"],
    "horovodrun": [BIN / "horovodrun", "-np", "2", "--gloo", sys.executable, "{recipe}"],
}
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None,
    reason="Horovod is not installed; scripts/install_horovod.sh builds and installs it",
)


@pytest.fixture(scope="module")
def run_by(small_recipe, tmp_path_factory):
    """Trains by a launcher, once; its run directory."""

    @cache
    def run_by(launcher: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(launcher) / "run"
        filled = [str(part).format(recipe=small_recipe) for part in COMMANDS[launcher]]
        root = str(Path(__file__).parents[2])
        result = run(*filled, *HOROVOD, "--run-dir", folder, PYTHONPATH=root)
        assert result.returncode == 0, result.stderr + result.stdout
        return folder

    return run_by


@needs_horovod
@pytest.mark.parametrize(
    "launcher",
    [pytest.param("torchrun", marks=pytest.mark.breadth), pytest.param("horovodrun", marks=pytest.mark.slow)],
)
def test_every_launcher_makes_the_same_run(launcher, run_by):
    launched = json.loads((run_by(launcher) / "launch.json").read_text())
    assert (launched["launcher"], launched["world_size"]) == (launcher, 2)
    assert losses(run_by(launcher)) == losses(run_by("local"))
    ours, theirs = (load_file(run_by(name) / "export/model.safetensors") for name in ("local", launcher))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@needs_horovod
@pytest.mark.breadth
def test_horovod_trains_the_same_as_deepspeed(run_by, small_recipe, tmp_path):
    result = llmtrain("train", small_recipe, "--nproc", "2", "--run-dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    for ours, theirs in zip(losses(run_by("local")), losses(tmp_path / "run"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)  # the bound of the project for fp32


@needs_horovod
@pytest.mark.breadth
def test_a_run_continues_under_horovodrun(run_by, small_recipe, tmp_path):
    command = [str(part).format(recipe=small_recipe) for part in COMMANDS["horovodrun"]]
    for more in (("--max-steps", "4"), ()):
        result = run(
            *command, *HOROVOD, "--run-dir", tmp_path / "run", *more, PYTHONPATH=str(Path(os.curdir).resolve())
        )
        assert result.returncode == 0, result.stderr + result.stdout
    assert losses(tmp_path / "run")[-1] == losses(run_by("local"))[-1]


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="Horovod is installed")
def test_without_horovod_nothing_starts(small_recipe, tmp_path):
    result = llmtrain("train", small_recipe, *HOROVOD, "--nproc", "2", "--run-dir", tmp_path / "run")
    assert result.returncode == 2
    assert "backend.installed" in result.stderr
    assert "scripts/install_horovod.sh" in result.stderr
    assert not (tmp_path / "run").exists()
