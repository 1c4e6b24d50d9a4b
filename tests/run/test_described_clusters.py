"""Workers that nobody but an MPI launcher or a description of the cluster has numbered train the same run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import llmtrain, losses, run

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def ours(small_recipe, tmp_path_factory):
    """The run of our own launcher."""
    run_dir = tmp_path_factory.mktemp("ours") / "run"
    result = llmtrain("train", small_recipe, "--nproc", "2", "--run-dir", run_dir)
    assert result.returncode == 0, result.stderr
    return run_dir


def _free_port(family: socket.AddressFamily = socket.AF_INET) -> int:
    with socket.socket(family) as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _command(launcher: str) -> list[str]:
    if launcher == "openmpi":
        return ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    return ["mpiexec.hydra", "-n", "2", "-genv", "MASTER_PORT", str(_free_port())]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_mpirun(launcher, ours, small_recipe, tmp_path):
    command = _command(launcher)
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed; Debian's packages are openmpi-bin and mpich")
    result = run(*command, sys.executable, small_recipe, "--run-dir", tmp_path / "run", PYTHONPATH=ROOT)
    assert result.returncode == 0, result.stderr + result.stdout
    launched = json.loads((tmp_path / "run" / "launch.json").read_text())
    assert (launched["launcher"], launched["world_size"]) == (launcher, 2)
    assert losses(tmp_path / "run") == losses(ours)


@pytest.mark.slow
def test_a_cluster_described_by_tf_config_over_ipv6(ours, small_recipe, tmp_path):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    cluster = {"worker": [f"[::1]:{_free_port(socket.AF_INET6)}", "[::1]:2"]}
    started = []
    for index in (0, 1):
        env = {**os.environ, "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}
        command = [sys.executable, str(small_recipe), "--run-dir", str(tmp_path / "run")]
        started.append(subprocess.Popen(command, env=env | {"PYTHONPATH": ROOT}, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert json.loads((tmp_path / "run" / "launch.json").read_text())["launcher"] == "tf_config"
    assert losses(tmp_path / "run") == losses(ours)
