"""A second run in a run directory is refused while the first is alive, and takes over when it is dead."""

import os
import signal
import sys

import pytest

from llmtrain.errors import Exit
from tests.helpers.commands import llmtrain, metrics, run, workers
from tests.helpers.small_runs import start

LONG = ("--set", "train.max_steps=100000", "--set", "checkpoint.every_steps=4")


@pytest.mark.slow
def test_a_second_run_in_a_run_directory_is_refused(small_recipe, tmp_path):
    first = start(small_recipe, tmp_path / "run", *LONG, "--nproc", "1")
    second = llmtrain("train", small_recipe, "--run-dir", tmp_path / "run", *LONG)
    first.kill()
    first.communicate()
    assert second.returncode == Exit.USAGE
    assert f"in use: process {first.pid} on {os.uname().nodename}" in second.stderr
    assert "Data made" not in second.stdout


@pytest.mark.breadth
def test_an_active_run_can_only_be_read_and_is_taken_over_once_it_is_dead(small_recipe, tmp_path):
    run_dir = tmp_path / "run"
    first = start(small_recipe, run_dir, *LONG)
    assert llmtrain("checkpoint", "list", run_dir).returncode == Exit.DONE
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    by_torchrun = run(*torchrun, small_recipe, "--run-dir", run_dir, *LONG)
    assert by_torchrun.returncode != Exit.DONE
    assert f"in use: process {first.pid}" in by_torchrun.stderr

    os.kill(workers(first.pid)[0], signal.SIGSTOP)  # rank 0, which logs
    first.kill()
    first.wait()
    further = metrics(run_dir)[-1]["step"] + 4
    taken = llmtrain("train", small_recipe, "--run-dir", run_dir, "--max-steps", further, *LONG)
    assert f"taking over from process {first.pid}" in taken.stderr, taken.stdout
    assert taken.returncode == Exit.DONE, taken.stderr
    assert metrics(run_dir)[-1]["step"] == further
    assert not (run_dir / ".lock").exists()
