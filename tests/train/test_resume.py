"""A stopped and continued run equals an uninterrupted one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.folder import newest
from tests.helpers.commands import events, forked_llmtrain, llmtrain, losses, metrics, workers

ZERO = ("--set", "parallel.zero_stage=1", "--nproc", "2")
TENSORBOARD = ("--set", 'logging.trackers=["tensorboard"]')


@pytest.fixture(scope="module")
def uninterrupted(small_recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    result = llmtrain("train", small_recipe, "--run-dir", run_dir, *ZERO)
    assert result.returncode == 0, result.stderr
    return run_dir


def _weights(run_dir):
    from safetensors.numpy import load_file

    return {name: value.tobytes() for name, value in load_file(run_dir / "export" / "model.safetensors").items()}


def test_a_stopped_and_continued_run_equals_the_uninterrupted_one_bit_for_bit(small_recipe, uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    for extra in (["--max-steps", "5"], []):
        result = llmtrain("train", small_recipe, "--run-dir", run_dir, *ZERO, *extra)
        assert result.returncode == 0, result.stderr
    assert "continuing after step 5" in result.stdout
    noted = [(one["event"], one["step"], one["text"]) for one in events(run_dir)]
    assert [(event, step) for event, step, _ in noted] == [
        *(("started", 0), ("stopped", 5), ("started", 5), ("finished", 12)),
    ]
    assert noted[1][2] == "by --max-steps"
    assert losses(run_dir) == losses(uninterrupted)
    assert _weights(run_dir) == _weights(uninterrupted)


@pytest.mark.breadth
def test_a_killed_worker_ends_the_run_and_loses_one_interval(small_recipe, uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "llmtrain", "train", str(small_recipe), "--run-dir", str(run_dir), *ZERO]
    slow = ["--set", "train.max_steps=5000", "--set", "checkpoint.keep_last=2"]
    process = subprocess.Popen([*command, *slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids = _workers_once(process.pid, lambda: newest(run_dir / "checkpoints") is not None)
    os.kill(pids[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "SIGKILL" in errors.splitlines()[0]
    assert not [pid for pid in pids if _alive(pid)]
    kept = newest(run_dir / "checkpoints")
    verify_checkpoint(kept)
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
    return workers(launcher)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_another_recipe_is_refused(small_recipe, uninterrupted):
    result = forked_llmtrain("train", small_recipe, "--run-dir", uninterrupted, *ZERO, "--set", "optim.lr=0.5")
    assert result.returncode == 2
    assert "optim.lr" in result.stderr


def test_resume_never_does_not_replace_checkpoints(small_recipe, uninterrupted):
    result = forked_llmtrain("train", small_recipe, "--run-dir", uninterrupted, *ZERO, "--resume", "never")
    assert result.returncode == 2
    assert "--run-dir" in result.stderr


def _damage(checkpoint):
    """Flips a bit in the middle of an optimizer shard."""
    shard = sorted((checkpoint / "engine").glob("rank_*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return shard


@pytest.fixture(scope="module")
def stopped(small_recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    result = llmtrain("train", small_recipe, "--run-dir", run_dir, *ZERO, "--max-steps", "10", *TENSORBOARD)
    assert result.returncode == 0, result.stderr
    return run_dir


@pytest.fixture
def interrupted(stopped, tmp_path):
    """A run that was stopped after step 10."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.mark.slow
def test_another_layout_continues(small_recipe, uninterrupted, interrupted):
    other = ("--nproc", "2", "--set", "parallel.zero_stage=3", "--set", "batch.micro_batch_size=1")
    result = llmtrain("train", small_recipe, "--run-dir", interrupted, *other)
    assert result.returncode == 0, result.stderr
    assert "continuing after step 10" in result.stdout
    for ours, theirs in zip(losses(interrupted), losses(uninterrupted), strict=True):
        assert ours[:2] == pytest.approx(theirs[:2], rel=1e-6)  # step and loss
        assert ours[2:] == pytest.approx(theirs[2:], rel=1e-5)  # gradient norm, rate, tokens, samples


@pytest.mark.slow
def test_another_learning_rate_continues_with_the_optimizers_state(small_recipe, uninterrupted, interrupted):
    changed = ("--set", "optim.lr=1e-4", "--allow-change", "optim.lr")
    result = llmtrain("train", small_recipe, "--run-dir", interrupted, *ZERO, *changed)
    assert result.returncode == 0, result.stderr
    assert "→ 0.0001" in result.stdout
    ours, theirs = ([line for line in metrics(run) if "loss" in line] for run in (interrupted, uninterrupted))
    assert ours[10]["loss"] == theirs[10]["loss"]
    assert ours[10]["lr"] < theirs[10]["lr"]
    assert json.loads((interrupted / "history.json").read_text())[-1]["values"]["optim.lr"] == 1e-4


@pytest.mark.breadth
def test_another_global_batch_continues_with_the_next_samples(small_recipe, uninterrupted, interrupted):
    """The cursor counts samples, the schedule steps: neither jumps."""
    result = llmtrain("train", small_recipe, "--run-dir", interrupted, *ZERO, "--set", "batch.global_batch_size=16")
    assert result.returncode == 0, result.stderr
    ours, theirs = ([line for line in metrics(run) if "loss" in line] for run in (interrupted, uninterrupted))
    assert [line["samples"] for line in ours[9:]] == [80, 96, 112]
    assert [line["lr"] for line in ours] == [line["lr"] for line in theirs]
    assert ours[9]["tokens"] == theirs[9]["tokens"]
    # The first batch of sixteen is the next two of eight.
    assert ours[10]["tokens"] == theirs[11]["tokens"]


@pytest.mark.slow
def test_a_damaged_checkpoint_loses_one_interval_and_is_reported(small_recipe, uninterrupted, interrupted):
    shard = _damage(interrupted / "checkpoints" / "step_00000010")
    listed = llmtrain("checkpoint", "verify", interrupted, "--json")
    assert listed.returncode == 4
    checked = {Path(one["folder"]).name: one for one in json.loads(listed.stdout)["checkpoints"]}
    assert {name: one["complete"] for name, one in checked.items()} == {
        "step_00000004": True,
        "step_00000008": True,
        "step_00000010": False,
    }
    assert [problem["field"] for problem in checked["step_00000010"]["problems"]] == [str(shard)]
    result = llmtrain("train", small_recipe, "--run-dir", interrupted, *ZERO, *TENSORBOARD)
    assert result.returncode == 0, result.stderr
    assert shard.name in result.stdout
    assert "falling back to step_00000008" in result.stdout
    # No line is missing or duplicated, and each one equals that of an undisturbed run.
    assert losses(interrupted) == losses(uninterrupted)
    assert _weights(interrupted) == _weights(uninterrupted)
    assert _tracked(interrupted) == {line["step"]: line["loss"] for line in metrics(uninterrupted) if "loss" in line}


def _tracked(run_dir) -> dict[int, float]:
    """Step → loss as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload().Scalars("train/loss")
    assert len({event.step for event in events}) == len(events)
    return {event.step: pytest.approx(event.value, rel=1e-6) for event in events}


@pytest.mark.breadth
def test_a_run_with_unreadable_checkpoints_does_not_start_from_scratch(small_recipe, interrupted):
    before = losses(interrupted)
    for folder in (interrupted / "checkpoints").glob("step_*"):
        _damage(folder)
    result = llmtrain("train", small_recipe, "--run-dir", interrupted, *ZERO, *TENSORBOARD)
    assert result.returncode == 4
    assert "contains no complete checkpoint" in result.stderr
    assert result.stderr.count("its hash differs") == 3
    assert "Traceback" not in result.stderr
    assert losses(interrupted) == before


def test_checkpoints_are_listed(uninterrupted):
    rows = json.loads(forked_llmtrain("checkpoint", "list", uninterrupted, "--json").stdout)["checkpoints"]
    assert [(row["step"], row["samples"], row["latest"], row["world_size"]) for row in rows] == [
        (4, 32, False, 2),
        (8, 64, False, 2),
        (12, 96, True, 2),
    ]
    # The last one was evaluated, after the same step.
    evaluated = next(
        line["eval_loss"] for line in metrics(uninterrupted) if line.get("eval_loss") and line["step"] == 12
    )
    assert [row["eval_loss"] for row in rows] == [None, None, evaluated]
    table = forked_llmtrain("checkpoint", "list", uninterrupted).stdout.splitlines()
    assert len(table) == 4
    assert table[-1].startswith("step_00000012")
    assert table[-1].rstrip().endswith("latest")


@pytest.mark.breadth
def test_a_checkpoint_of_another_run_starts_a_branch_and_replaces_nothing(
    small_recipe, uninterrupted, interrupted, tmp_path
):
    named = uninterrupted / "checkpoints" / "step_00000008"
    result = llmtrain("train", small_recipe, "--run-dir", interrupted, *ZERO, "--resume", named)
    assert result.returncode == 4
    assert "checkpoints of its own" in result.stderr
    branch = tmp_path / "branch"
    result = llmtrain("train", small_recipe, "--run-dir", branch, *ZERO, "--resume", named)
    assert result.returncode == 0, result.stderr
    assert losses(branch) == [line for line in losses(uninterrupted) if line[0] > 8]
    assert _weights(branch) == _weights(uninterrupted)


def test_checkpoints_are_verified_and_exported(uninterrupted, tmp_path):
    assert forked_llmtrain("checkpoint", "verify", uninterrupted).returncode == 0
    assert forked_llmtrain("export", uninterrupted, tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        uninterrupted / "export" / "model.safetensors"
    ).read_bytes()
    again = forked_llmtrain("export", uninterrupted, tmp_path / "out")
    assert again.returncode == 4
    assert "not empty" in again.stderr
