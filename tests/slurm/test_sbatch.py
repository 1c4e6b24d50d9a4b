"""The batch script as bash runs it. `srun` and `scontrol` stand in for Slurm, which is not there."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "slurm" / "train.sbatch"
SRUN = """#!/bin/bash
printf '%s\\0' "$@" > "$CALLS/srun"
while [ ! -e "$CALLS/end" ]; do sleep 0.02; done
exit "$(cat "$CALLS/end")"
"""
SCONTROL = """#!/bin/bash
case "$1" in
show) printf 'node-7\\nnode-8\\n' ;;
requeue) echo "$2" > "$CALLS/requeued"; echo 143 > "$CALLS/end.new"; mv "$CALLS/end.new" "$CALLS/end" ;;
esac
"""


@pytest.fixture
def job(tmp_path):
    """Starts the script with arguments, as a job of two nodes would."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    env = {**os.environ, **slurm, "SLURM_GPUS_ON_NODE": "8", "CALLS": str(tmp_path)}
    env["PATH"] = f"{programs}:{env['PATH']}"

    def start(*arguments):
        return subprocess.Popen(["bash", str(SCRIPT), *arguments], env=env, text=True, stderr=subprocess.PIPE)

    return start


def wait_for(path):
    deadline = time.monotonic() + 15
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


@pytest.mark.parametrize("script", sorted(SCRIPT.parent.glob("*.sbatch")), ids=lambda path: path.name)
def test_syntax(script):
    subprocess.run(["bash", "-n", script], check=True)


def test_one_torchrun_per_node_with_the_arguments_as_given(job, tmp_path):
    (tmp_path / "end").write_text("0")
    arguments = ["recipes/tiny.py", "--run-dir", "a b $(touch x)", "--set", 'export.sample_prompt="it\'s"', ""]
    assert job(*arguments).wait(timeout=15) == 0
    called = (tmp_path / "srun").read_text().split("\0")[:-1]
    assert called[:2] == ["--kill-on-bad-exit=1", "torchrun"]
    assert called[-len(arguments) :] == arguments
    options = dict(zip(called[2 : -len(arguments) : 2], called[3 : -len(arguments) : 2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--nproc_per_node": "8",
        "--rdzv_id": "123456",
        "--rdzv_backend": "c10d",
        "--rdzv_endpoint": "node-7:23456",
    }


def test_a_failure_is_the_failure_of_the_job(job, tmp_path):
    (tmp_path / "end").write_text("5")
    assert job("recipes/tiny.py").wait(timeout=15) == 5


def test_the_warning_puts_the_job_back_into_the_queue(job, tmp_path):
    process = job("recipes/tiny.py")
    wait_for(tmp_path / "srun")
    time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=15) == 143
    assert (tmp_path / "requeued").read_text() == "123456\n"


def test_without_a_recipe_it_says_how(job):
    process = job()
    _, message = process.communicate(timeout=15)
    assert process.returncode == 2
    assert message.startswith("usage: sbatch")
