"""torchrun and accelerate, under `llmtrain train` and by printed commands, train the same run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.launch.rendezvous import TORCHRUN_PORT
from llmtrain.launch.tools import TOOLS
from tests.helpers.commands import BREAKABLE, llmtrain, losses, metrics, run
from tests.helpers.launching_doc import commands

STEPS = 30
RUN = (
    *("--set", "parallel.zero_stage=1", "--set", "export.at_end=false", "--set", f"train.max_steps={STEPS}"),
    *("--set", "evaluation.every_steps=0"),
)

BY_FIRST = pytest.mark.parametrize(
    "tool",
    [
        pytest.param(tool, marks=pytest.mark.breadth if number else pytest.mark.slow)
        for number, tool in enumerate(TOOLS)
    ],
)


@pytest.fixture(scope="module")
def by_us(small_recipe, tmp_path_factory):
    """The run of our own launcher."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    result = llmtrain("train", small_recipe, "--run-dir", run_dir, "--nproc", 2, *RUN)
    assert result.returncode == 0, result.stderr
    return run_dir


@pytest.mark.breadth
@BY_FIRST
def test_a_stopped_and_continued_run_equals_that_of_our_own_launcher(small_recipe, by_us, tmp_path, tool):
    run_dir = tmp_path / "a run"
    train = ("train", small_recipe, "--run-dir", run_dir, "--nproc", 2, "--launcher", tool, *RUN)
    command = [sys.executable, "-m", "llmtrain", *map(str, train)]
    waits = {"FAULT": "slow:0:1", "PYTHONPATH": BREAKABLE}  # in each step, so that it does not end first
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env={**os.environ, **waits}, **pipes)
    while process.poll() is None and not ((run_dir / "metrics.jsonl").exists() and metrics(run_dir)):
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)  # torchrun itself would die of it
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 75, output + errors
    assert "stopped on SIGUSR1 after step" in output
    again = llmtrain(*train)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stderr == ""
    assert losses(run_dir) == losses(by_us)


@BY_FIRST
def test_a_worker_that_is_killed_is_named(small_recipe, tmp_path, tool):
    run_dir = tmp_path / "run"
    env = {"FAULT": "kill:1:6", "PYTHONPATH": BREAKABLE}
    result = llmtrain("train", small_recipe, "--run-dir", run_dir, "--nproc", 2, "--launcher", tool, *RUN, **env)
    assert result.returncode == 5, result.stdout + result.stderr
    assert "rank 1: killed by signal 9 (SIGKILL)" in result.stderr
    assert "Traceback" not in result.stderr


@BY_FIRST
def test_the_printed_lines_train_on_two_nodes(small_recipe, by_us, tmp_path, tool):
    """Two shells stand for two nodes; the command that prints them is the documented one."""
    run_dir = tmp_path / "it's a run"
    [line] = commands("One command on each node", f"--launcher {tool}")
    arguments = line.removeprefix("llmtrain ").replace("recipes/tiny.py", str(small_recipe)).split()
    printed = llmtrain(*arguments, "--run-dir", run_dir, *RUN)
    assert printed.returncode == 0, printed.stderr
    lines = [line for line in printed.stdout.splitlines() if not line.startswith("#")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HEAD": "localhost"}
    for line in lines[:-1]:
        subprocess.run(["sh", "-ec", line], env=env, check=True, capture_output=True)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    line = lines[-1].replace(str(TORCHRUN_PORT), str(port))
    started = [
        subprocess.Popen(["sh", "-ec", line], env={**env, "NODE": str(node)}, stderr=subprocess.PIPE, text=True)
        for node in range(2)
    ]
    errors = [process.communicate(timeout=200)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert losses(run_dir) == losses(by_us)


@pytest.mark.slow
def test_a_printed_command_without_the_first_node_reports_it(small_recipe, tmp_path):
    nodes = ("--nodes", 2, "--gpus-per-node", 1, "--device", "cpu")
    printed = llmtrain("train", small_recipe, "--run-dir", tmp_path, "--launcher", "torchrun", *nodes, "--dry-run")
    env = {name: value for name, value in os.environ.items() if name != "HEAD"}
    refused = subprocess.run(["sh", "-c", printed.stdout], capture_output=True, text=True, env=env)
    assert refused.returncode != 0
    assert "NODE: 0 on the first node" in refused.stderr


@pytest.mark.breadth
def test_a_stop_signal_on_one_node_stops_all_nodes_and_each_reports_it(small_recipe, tmp_path):
    """Exit codes and signals are those of our own launcher on every node."""
    run_dir = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    meet = ("--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "localhost", "--master-port", port)
    script = (small_recipe, "--run-dir", run_dir, *RUN, "--set", "train.max_steps=100000")
    commands = [
        [sys.executable, "-m", "llmtrain.launch.torchrun", *map(str, (*meet, "--node-rank", node, *script))]
        for node in range(2)
    ]
    nodes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    while all(node.poll() is None for node in nodes) and not (
        (run_dir / "metrics.jsonl").exists() and metrics(run_dir)
    ):
        time.sleep(0.01)
    nodes[1].send_signal(signal.SIGTERM)
    errors = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [75, 75], errors


@pytest.mark.slow
def test_a_user_error_is_the_exit_code_of_a_node(small_recipe, tmp_path):
    command = ("-m", "llmtrain.launch.torchrun", "--standalone", "--nproc-per-node", 2)
    result = run(sys.executable, *command, small_recipe, "--run-dir", tmp_path, "--set", "optim.lr=fast")
    assert result.returncode == 2, result.stderr
    assert "optim.lr" in result.stderr
