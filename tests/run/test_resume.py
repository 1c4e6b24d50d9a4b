"""Stop, continue, and have what an uninterrupted run has."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import llmtrain, losses, metrics

from llmtrain.checkpoint.folder import newest, verify

ZERO = ("--set", "parallel.zero_stage=1", "--nproc", "2")


@pytest.fixture(scope="module")
def uninterrupted(small_recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    result = llmtrain("train", small_recipe, "--run-dir", run_dir, *ZERO)
    assert result.returncode == 0, result.stderr
    return run_dir


def _weights(run_dir):
    from safetensors.numpy import load_file

    return {name: value.tobytes() for name, value in load_file(run_dir / "export" / "model.safetensors").items()}


def test_stopped_and_continued_is_uninterrupted_bit_for_bit(small_recipe, uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    for extra in (["--max-steps", "5"], []):
        result = llmtrain("train", small_recipe, "--run-dir", run_dir, *ZERO, *extra)
        assert result.returncode == 0, result.stderr
    assert "continuing after step 5" in result.stdout
    assert losses(run_dir) == losses(uninterrupted)
    assert _weights(run_dir) == _weights(uninterrupted)


def test_a_killed_worker_ends_the_run_and_costs_one_interval(small_recipe, uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "llmtrain", "train", str(small_recipe), "--run-dir", str(run_dir), *ZERO]
    slow = ["--set", "train.max_steps=5000", "--set", "checkpoint.keep_last=2"]
    process = subprocess.Popen([*command, *slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    workers = _workers_once(process.pid, lambda: newest(run_dir / "checkpoints") is not None)
    os.kill(workers[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "SIGKILL" in errors.splitlines()[0]
    assert not [pid for pid in workers if _alive(pid)]
    kept = newest(run_dir / "checkpoints")
    verify(kept)
    # The schedule depends on max_steps, so the run is finished under the one it was started with.
    stop = json.loads((kept / "trainer.json").read_text())["step"] + 3
    result = llmtrain("train", small_recipe, "--run-dir", run_dir, *ZERO, *slow, "--max-steps", stop)
    assert result.returncode == 0, result.stderr
    steps = [line["step"] for line in metrics(run_dir) if "loss" in line]
    assert steps == list(range(1, stop + 1))


def _workers_once(launcher: int, ready) -> list[int]:
    """Process ids of the launcher's workers, by rank, once something has happened."""
    deadline = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    return sorted(int(pid) for pid in children.split())


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_another_layout_is_refused_before_anything_is_loaded(small_recipe, uninterrupted):
    before = losses(uninterrupted)
    other = ("--set", "parallel.zero_stage=2", "--set", "train.max_steps=20", "--nproc", "2")
    result = llmtrain("train", small_recipe, "--run-dir", uninterrupted, *other)
    assert result.returncode == 4
    assert "zero_stage 1 → 2" in result.stderr
    assert "Traceback" not in result.stderr
    assert losses(uninterrupted) == before


def test_another_recipe_is_refused(small_recipe, uninterrupted):
    result = llmtrain("train", small_recipe, "--run-dir", uninterrupted, *ZERO, "--set", "optim.lr=0.5")
    assert result.returncode == 2
    assert "optim.lr" in result.stderr


def test_never_does_not_replace_checkpoints(small_recipe, uninterrupted):
    result = llmtrain("train", small_recipe, "--run-dir", uninterrupted, *ZERO, "--resume", "never")
    assert result.returncode == 2
    assert "--run-dir" in result.stderr


@pytest.mark.slow
def test_checkpoints_are_listed_verified_and_exported(uninterrupted, tmp_path):
    listed = llmtrain("checkpoint", "list", uninterrupted)
    assert [line.split()[0].rpartition("/")[2] for line in listed.stdout.splitlines()] == [
        "step_00000004",
        "step_00000008",
        "step_00000012",
    ]
    assert llmtrain("checkpoint", "verify", uninterrupted).returncode == 0
    assert llmtrain("export", uninterrupted, tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        uninterrupted / "export" / "model.safetensors"
    ).read_bytes()
    again = llmtrain("export", uninterrupted, tmp_path / "out")
    assert again.returncode == 4
    assert "not empty" in again.stderr
