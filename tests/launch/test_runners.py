"""The command lines of DeepSpeed's launcher and mpirun, and the lines that they print; nothing is started."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from llmtrain.launch import runners
from llmtrain.launch.hostfile import Host
from llmtrain.launch.runners import RUNNERS, Launch

LAUNCH = Launch((Host("a", (0, 2)), Host("b", (1,))), Path("/tmp/llmtrain-1/start.py"), "192.0.2.1", 23456)


def test_deepspeed_gets_the_rendezvous_and_the_devices(tmp_path):
    command = RUNNERS["pdsh"].command(LAUNCH, tmp_path)
    told = dict(pairwise(command))
    assert (told["--include"], told["--launcher"]) == ("a:0,2@b:1", "pdsh")
    assert (told["--master_addr"], told["--master_port"]) == ("192.0.2.1", "23456")
    assert Path(told["--hostfile"]).read_text() == "a slots=3\nb slots=2\n"


def test_each_host_is_a_part_of_the_command_line_of_mpirun(tmp_path, monkeypatch):
    monkeypatch.setattr(runners, "mpirun", lambda: "mpirun.openmpi")
    command = RUNNERS["openmpi"].command(LAUNCH, tmp_path)
    parts = " ".join(command[command.index("--host") :]).split(" : ")
    assert [part.split(" ")[:4] for part in parts] == [["--host", "a:2", "-n", "2"], ["--host", "b:1", "-n", "1"]]
    assert [part.split("start.py ")[1] for part in parts] == ["0 0,2 192.0.2.1 23456", "1 1 192.0.2.1 23456"]
    assert command[command.index("--bind-to") + 1] == "none"


def test_runners_get_no_variables_that_they_would_pass_on():
    env = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "PYTHONPATH": "/x", "HF_TOKEN": "secret", "OMPI_MCA_plm": "rsh"}
    assert RUNNERS["pdsh"].environment(env).keys() & env.keys() == {"PATH", "HF_TOKEN", "OMPI_MCA_plm"}
    assert RUNNERS["openmpi"].environment({**env, "RANK": "3", "SLURM_JOB_ID": "1"}).keys() == {"PATH", "OMPI_MCA_plm"}


STEP = "step 1/6  loss 6.1853  grad 1.4824  lr 0.00e+00  5.93k tok/s  0s left\n"


def test_lines_of_pdsh_are_known():
    is_launcher_line = RUNNERS["pdsh"].launcher_line_filter()
    assert is_launcher_line("[2026-11-21 12:13:21,207] [INFO] [launch.py:170:main] dist_world_size=2")
    assert is_launcher_line("pdsh@vm: 192.0.2.2: ssh exited with exit code 5")
    assert not is_launcher_line(STEP)


MPIRUN = f"""{"-" * 74}
ORTE has lost communication with a remote daemon.

  HNP daemon   : [[19957,0],0] on node vm
  Remote daemon: [[19957,0],1] on node 192.0.2.2

This is usually due to either a failure of the TCP network
{"-" * 74}
"""


def test_paragraphs_of_mpirun_are_known():
    is_launcher_line = RUNNERS["openmpi"].launcher_line_filter()
    lines = [STEP, *MPIRUN.splitlines(), STEP, *MPIRUN.splitlines(), STEP]
    assert [line for line in lines if not is_launcher_line(line)] == [STEP] * 3
    assert is_launcher_line("[vm:04711] 1 more process has sent help message help-orterun.txt")


@pytest.mark.parametrize(
    ("runner", "said"),
    [("pdsh", "pdsh@vm: 192.0.2.2: ssh exited with exit code 255\n"), ("openmpi", MPIRUN)],
)
def test_a_lost_host_is_read_from_the_output_of_runners(runner, said):
    assert RUNNERS[runner].lost.search(f"{STEP}{said}")["host"] == "192.0.2.2"
    assert RUNNERS[runner].lost.search(STEP) is None


def test_a_killed_rank_is_read_from_the_output_of_mpirun():
    said = "mpirun noticed that process rank 1 with PID 21138 on node 192.0.2.2 exited on signal 9 (Killed).\n"
    found = RUNNERS["openmpi"].killed.search(said)
    assert (found["rank"], found["signal"]) == ("1", "9 (Killed)")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"mpirun": "mpirun (Open MPI) 4.1.4"}, "mpirun"),
        ({"mpirun": "HYDRA build details", "mpirun.openmpi": "mpirun.openmpi (OpenRTE) 4.1.4"}, "mpirun.openmpi"),
        ({"mpirun": "HYDRA build details"}, None),
        ({}, None),
    ],
)
def test_only_mpirun_of_open_mpi_is_used(tmp_path, monkeypatch, said, name):
    for program, words in said.items():
        (tmp_path / program).write_text(f"#!/bin/sh\necho '{words}'\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runners.mpirun() == name
