"""A rank that stops, hangs, crashes or is slow is named, and the run ends with exit code 5 and can be continued."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from llmtrain.launch.rendezvous import reserved_port
from tests.helpers.commands import BREAKABLE, llmtrain, losses, workers

STEPS = 12
RUN = (
    *("--nproc", "2", "--set", "parallel.zero_stage=1", "--set", "export.at_end=false"),
    *("--set", f"train.max_steps={STEPS}", "--set", "evaluation.every_steps=6"),
)
HANGS = ("--set", "watchdog.min_seconds=8")
"""Soon, and later than any step of a busy machine."""
SAVED = ("--set", "checkpoint.background=false")
"""A step takes milliseconds here: the checkpoint of step 4 is to be whole when step 6 is what kills."""


def train(small_recipe, run_dir, fault, *arguments) -> subprocess.CompletedProcess[str]:
    """A run with a broken rank."""
    return llmtrain("train", small_recipe, "--run-dir", run_dir, *RUN, *arguments, FAULT=fault, PYTHONPATH=BREAKABLE)


@pytest.fixture(scope="module")
def uninterrupted(small_recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    result = llmtrain("train", small_recipe, "--run-dir", run_dir, *RUN)
    assert result.returncode == 0, result.stderr
    return run_dir


def stacks(run_dir: Path, rank: int) -> str:
    return (run_dir / "logs" / f"rank_{rank}.log").read_text()


@pytest.mark.parametrize(
    ("fault", "says", "frame"),
    [
        pytest.param("stop", "stopped by a signal (SIGSTOP)", "sitecustomize.py", marks=pytest.mark.slow),
        pytest.param("gil", "in _hold_the_gil", "_hold_the_gil", marks=pytest.mark.breadth),
        pytest.param("sleep", "sitecustomize.py", "sitecustomize.py", marks=pytest.mark.breadth),
    ],
)
def test_a_hanging_rank_is_named_and_ends_the_run(small_recipe, tmp_path, fault, says, frame):
    run_dir = tmp_path / "run"
    result = train(small_recipe, run_dir, f"{fault}:1:5", *HANGS)
    assert result.returncode == 5, result.stderr
    assert re.search(r"^error: rank 1: did not arrive: no step for \d+ s, but only 8 s are allowed", result.stderr)
    assert re.search(rf"rank 1 on \S+ \(process \d+\): step 5, training for \d+ s, .*{re.escape(says)}", result.stderr)
    assert "the others wait: rank 0" in result.stderr
    assert "Traceback" not in result.stderr
    assert frame in stacks(run_dir, 1)
    assert "all_reduce" in stacks(run_dir, 0)
    for rank in (0, 1):
        failure = json.loads((run_dir / "logs" / f"rank_{rank}.error.json").read_text())
        assert (failure["exit_code"], failure["problems"][0]["rule"]) == (5, "worker.hang")


@pytest.mark.breadth
@pytest.mark.parametrize("arguments", [(), ("--launcher", "torchrun")], ids=["ours", "torchrun"])
def test_a_run_ends_if_rank_0_is_stopped_with_its_watcher(small_recipe, tmp_path, arguments):
    """The other rank no longer hears anything of it."""
    result = train(small_recipe, tmp_path / "run", "stop_both:0:5", *arguments)
    assert result.returncode == 5, result.stderr
    [problem] = re.findall(r"^error: .*", result.stderr, re.MULTILINE)
    assert re.fullmatch(r"error: rank 1 on \S+: lost contact with rank 0: .* \[worker.cut_off\]", problem)
    assert "Traceback" not in result.stderr


@pytest.mark.breadth
@pytest.mark.parametrize(("victim", "other"), [(1, 0), (0, 1)])
def test_separately_started_ranks_end_if_one_is_gone(small_recipe, tmp_path, victim, other):
    """The other rank sleeps, so no lost connection informs it."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    fault = {"FAULT": f"late_kill:{victim}:6,sleep:{other}:6", "PYTHONPATH": BREAKABLE}
    command = [sys.executable, str(small_recipe), "--run-dir", str(tmp_path / "run"), *RUN[2:]]
    ranks = []
    with reserved_port() as port:
        for rank in (0, 1):
            at = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            env = {**os.environ, **common, **fault, **at}
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            ranks.append(subprocess.Popen(command, env=env, text=True, **pipes))
        error = ranks[other].communicate(timeout=200)[1]
    ranks[victim].communicate(timeout=10)
    assert ranks[other].returncode == 5
    gone = "rank 1: ended, or its machine does not answer"
    cut_off = f"rank 1 on {socket.gethostname()}: lost contact with rank 0"
    assert f"error: {gone if victim else cut_off}" in error


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        pytest.param("kill", "killed by signal 9 (SIGKILL)", marks=pytest.mark.slow),
        pytest.param("exception", "RuntimeError: injected", marks=pytest.mark.breadth),
        pytest.param("stop", "stopped by a signal (SIGSTOP)", marks=pytest.mark.breadth),
        pytest.param("segv", "killed by signal 11 (SIGSEGV)", marks=pytest.mark.breadth),
        pytest.param("abort", "killed by signal 6 (SIGABRT)", marks=pytest.mark.breadth),
        pytest.param("gil", "in _hold_the_gil", marks=pytest.mark.breadth),
    ],
)
def test_a_job_that_dies_is_restarted_and_loses_nothing(small_recipe, uninterrupted, tmp_path, fault, says):
    run_dir = tmp_path / "run"
    result = train(small_recipe, run_dir, f"{fault}:1:6:{tmp_path / 'once'}", *HANGS, *SAVED, "--max-restarts", "2")
    assert result.returncode == 0, result.stderr
    assert says in result.stderr
    assert "died in step 6, with step_00000004; restart 1 of 2 in 1 s" in result.stdout
    assert "continuing after step 4" in result.stdout
    assert losses(run_dir) == losses(uninterrupted)
    for rank in (0, 1):
        assert stacks(run_dir, rank).count(f": rank {rank} of 2, process ") == 2


@pytest.mark.breadth
def test_a_job_that_dies_twice_in_one_step_is_not_restarted(small_recipe, tmp_path):
    result = train(small_recipe, tmp_path / "run", "abort:1:6", *SAVED, "--max-restarts", "5")
    assert result.returncode == 5
    assert result.stdout.count("restart ") == 1
    assert "died twice in step 6, with step_00000004" in result.stderr


@pytest.mark.breadth
@pytest.mark.slow
def test_a_long_step_evaluation_or_save_is_not_a_hang(small_recipe, uninterrupted, tmp_path):
    pauses = {when: tmp_path / when for when in ("1", "evaluating", "saving")}
    fault = ",".join(f"pause:0:{when}:{once}" for when, once in pauses.items())
    result = train(small_recipe, tmp_path / "run", fault, *HANGS)
    assert result.returncode == 0, result.stderr
    assert all(once.exists() for once in pauses.values())
    assert losses(tmp_path / "run") == losses(uninterrupted)


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.breadth
def test_only_the_save_is_lost_if_a_rank_dies_during_it(small_recipe, uninterrupted, tmp_path, fault):
    run_dir = tmp_path / "run"
    result = train(small_recipe, run_dir, f"{fault}:1:saving:{tmp_path / 'once'}", *HANGS, "--max-restarts", "1")
    assert result.returncode == 0, result.stderr
    assert "died in step 4, with no checkpoint" in result.stdout
    assert losses(run_dir) == losses(uninterrupted)


@pytest.mark.breadth
def test_repeated_signals_during_a_save_cause_one_more_save(small_recipe, uninterrupted, tmp_path):
    run_dir, once = tmp_path / "run", tmp_path / "once"
    command = [sys.executable, "-m", "llmtrain", "train", str(small_recipe), "--run-dir", str(run_dir), *RUN]
    env = {**os.environ, "PYTHONPATH": BREAKABLE, "FAULT": f"pause:0:saving:{once}"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not once.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = [process.pid, *workers(process.pid)]
    chosen = random.Random(1)
    while process.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(chosen.choice(pids), chosen.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]))
        time.sleep(0.005)
    output, errors = process.communicate()
    assert process.returncode == 75, output + errors
    # The save in which they came, and one after the next step: whether to stop after step 4 was asked before it.
    saved = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert saved == ["latest", "step_00000004", "step_00000005"]
    assert llmtrain("train", small_recipe, "--run-dir", run_dir, *RUN).returncode == 0
    assert losses(run_dir) == losses(uninterrupted)


@pytest.mark.breadth
def test_a_slow_rank_is_named(small_recipe, tmp_path):
    run_dir = tmp_path / "run"
    result = train(
        small_recipe, run_dir, "slow:1:3", "--set", "train.max_steps=90", "--set", "evaluation.every_steps=0"
    )
    assert result.returncode == 0, result.stderr
    told = re.search(r"^rank 1 is slow: it takes (\S+) times as long as the median rank", result.stdout, re.MULTILINE)
    assert float(told[1]) >= 1.5
    assert "straggler: rank 1 on " in stacks(run_dir, 0)


@pytest.mark.breadth
def test_a_hang_ends_with_exit_code_5_under_another_launcher(small_recipe, tmp_path):
    """Whoever has started the ranks; here each is started by hand."""
    run_dir = tmp_path / "run"
    ranks = []
    for rank in range(2):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "FAULT": "stop:1:5"}
        env |= {"PYTHONPATH": BREAKABLE}
        command = [sys.executable, "-m", "llmtrain", "train", str(small_recipe), "--run-dir", str(run_dir)]
        command += [*RUN[2:], *HANGS]
        ranks.append(subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True))
    told = [process.communicate(timeout=200)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [5, 5]
    assert "rank 1: did not arrive" in told[0]
