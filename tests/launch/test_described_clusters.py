"""Workers that only an MPI launcher or a description of the cluster has numbered train the same run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.launch.rendezvous import reserved_port
from tests.helpers.commands import llmtrain, losses, run

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def ours(small_recipe, tmp_path_factory):
    """The run of our own launcher."""
    run_dir = tmp_path_factory.mktemp("ours") / "run"
    result = llmtrain("train", small_recipe, "--nproc", "2", "--run-dir", run_dir)
    assert result.returncode == 0, result.stderr
    return run_dir


COMMANDS = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
    "mpich": ["mpiexec.hydra", "-n", "2"],
}


@pytest.mark.parametrize(
    "launcher", [pytest.param("openmpi", marks=pytest.mark.slow), pytest.param("mpich", marks=pytest.mark.breadth)]
)
def test_mpirun_trains_like_our_launcher(launcher, ours, small_recipe, tmp_path):
    command = COMMANDS[launcher]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed; Debian's packages are openmpi-bin and mpich")
    with reserved_port() as port:
        # Only MPICH takes it: Open MPI's ranks find a port by themselves.
        variables = {"PYTHONPATH": ROOT} | ({"MASTER_PORT": str(port)} if launcher == "mpich" else {})
        result = run(*command, sys.executable, small_recipe, "--run-dir", tmp_path / "run", **variables)
    assert result.returncode == 0, result.stderr + result.stdout
    launched = json.loads((tmp_path / "run" / "launch.json").read_text())
    assert (launched["launcher"], launched["world_size"]) == (launcher, 2)
    assert losses(tmp_path / "run") == losses(ours)


@pytest.mark.breadth
def test_a_cluster_described_by_tf_config_trains_over_ipv6(ours, small_recipe, tmp_path):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    command = [sys.executable, str(small_recipe), "--run-dir", str(tmp_path / "run")]
    started = []
    with reserved_port() as port:
        cluster = {"worker": [f"[::1]:{port}", "[::1]:2"]}
        for index in (0, 1):
            described = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            env = {**os.environ, "TF_CONFIG": described, "PYTHONPATH": ROOT}
            started.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert json.loads((tmp_path / "run" / "launch.json").read_text())["launcher"] == "tf_config"
    assert losses(tmp_path / "run") == losses(ours)
