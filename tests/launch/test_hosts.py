"""The data that hosts receive, and the messages about hosts that differ; nothing is started."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from llmtrain.errors import RecipeError, WorkerError
from llmtrain.launch import hosts
from llmtrain.launch.failure import Failure
from llmtrain.launch.host_agent import version_facts
from llmtrain.launch.hostfile import Host
from llmtrain.run_dir import RunDir
from llmtrain.system.heartbeat import Phase
from llmtrain.train.watchdog.diagnosis import Status, cut_off_problem, loss_problem

OWN = {"host": "here", "python": "3.11.7", "packages": {"torch": "2.13.0"}, "llmtrain": "1a", "recipe": "2b"}
STATUS = Status("b", 7, 3, Phase.TRAINING, 12.0, 60.0, False, "")


def test_variables_are_forwarded_on_purpose(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("# a comment\n\nMINE=a b = c\nNCCL_DEBUG=WARN\n")
    env = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "secret", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0", "SSH_CLIENT": "x"}
    assert hosts.forwarded(env, tmp_path / "home") == {"NCCL_DEBUG": "WARN", "HF_TOKEN": "secret", "MINE": "a b = c"}


def test_a_bad_line_of_the_file_of_variables_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("A=1\nB\n")
    with pytest.raises(RecipeError, match=r"\.deepspeed_env:2: 'B' is not NAME=VALUE"):
        hosts.forwarded({}, tmp_path / "home")


def test_a_file_of_variables_that_is_not_text_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_bytes(b"A=\xff\n")
    with pytest.raises(RecipeError, match=r"\.deepspeed_env: cannot be read"):
        hosts.forwarded({}, tmp_path / "home")


@pytest.mark.parametrize(
    ("answer", "rule", "said"),
    [
        (None, "launch.host", "did not answer within"),
        ((255, "", "ssh: connect to host b port 22: Connection refused"), "launch.host", "does not answer ssh: ssh:"),
        ((1, "", "warning\nNo module named llmtrain"), "launch.host", "cannot run llmtrain: No module named llmtrain"),
        (
            (0, json.dumps({**OWN, "python": "3.12.1"}), ""),
            "launch.versions",
            "differs from this machine: Python 3.12.1 instead of 3.11.7",
        ),
        ((0, json.dumps({**OWN, "llmtrain": "other"}), ""), "launch.versions", "different code of llmtrain"),
        ((0, json.dumps({**OWN, "recipe": "other"}), ""), "launch.versions", "a different recipe file"),
        ((0, json.dumps({**OWN, "recipe": None}), ""), "launch.versions", "no such recipe file"),
        (
            (0, json.dumps({**OWN, "packages": {"torch": "2.12.0", "apex": "1"}}), ""),
            "launch.versions",
            "apex 1 instead of none, torch 2.12.0 instead of 2.13.0",
        ),
    ],
)
def test_an_unsuitable_host_is_reported(answer, rule, said):
    process = answer and subprocess.CompletedProcess([], answer[0], answer[1], answer[2])
    [problem] = hosts._host_problems(Host("b", (0,)), process, OWN)
    assert (problem.rule, problem.field) == (rule, "b")
    assert said in problem.message


def test_an_equal_host_is_suitable():
    assert not list(hosts._host_problems(Host("b", (0,)), subprocess.CompletedProcess([], 0, json.dumps(OWN), ""), OWN))


def test_another_recipe_file_is_detected(tmp_path):
    recipe = tmp_path / "recipe.py"
    assert version_facts(recipe)["recipe"] is None
    recipe.write_text("a")
    first = version_facts(recipe)
    recipe.write_text("b")
    assert version_facts(recipe)["recipe"] != first["recipe"]
    assert version_facts(recipe)["llmtrain"] == first["llmtrain"]


def test_a_python_that_a_shell_would_misread_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/home/a b/python")
    with pytest.raises(RecipeError, match="unquoted"):
        hosts._check_launch_host("pdsh")


def test_programs_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(hosts.shutil, "which", lambda name: None)
    with pytest.raises(RecipeError, match="apt-get install pdsh"):
        hosts._check_launch_host("pdsh")
    with pytest.raises(RecipeError, match="apt-get install openmpi-bin"):
        hosts._check_launch_host("openmpi")


GONE, CUT_OFF = "rank 1: ended, or its machine does not answer", "rank 1 on b: lost contact with rank 0"
LOST = """lost communication with a remote daemon.
  HNP daemon   : [[1,0],0] on node a
  Remote daemon: [[1,0],1] on node b
"""


@pytest.mark.parametrize(
    ("written", "log", "told"),
    [
        ({0: loss_problem({1: STATUS}, [1]), 1: cut_off_problem(1, "b")}, "", GONE),
        ({0: loss_problem({1: STATUS}, [1]), 1: cut_off_problem(1, "b")}, LOST, GONE),
        ({1: cut_off_problem(1, "b")}, LOST, "b: the connection to it was lost"),
        ({1: cut_off_problem(1, "b")}, "", CUT_OFF),
    ],
)
def test_the_report_of_a_disconnected_rank_has_the_lowest_priority(tmp_path, written, log, told):
    """Both sides of a cable write to one disk, and the one without the launcher may be first."""
    job = hosts.HostsJob((Host("a", (0,)), Host("b", (0,))), tmp_path, (), RunDir(tmp_path), "openmpi")
    job.run_dir.logs.mkdir()
    for rank, problem in sorted(written.items(), reverse=True):
        Failure.of(rank, WorkerError(problem)).write(job.run_dir.error_file(rank))
    (job.run_dir.logs / "launcher.log").write_text(log)
    with pytest.raises(WorkerError) as error:
        hosts._outcome(job, 5, 0)
    assert [str(problem).startswith(told) for problem in error.value.problems] == [True]


def test_the_rendezvous_of_a_job_is_the_loopback_or_the_first_host(tmp_path, monkeypatch):
    one, other = Host("192.0.2.1", (0,)), Host("localhost", (0,))
    told = {"addresses": ["192.0.2.9", "172.17.0.1"]}

    def job(*named):
        return hosts.HostsJob(named, tmp_path, (), RunDir(tmp_path))

    def address(*named):
        return hosts._address(job(*named), told)

    assert address(one) == "127.0.0.1"
    assert hosts._rendezvous(job(one, other), {**told, "port": 23456}) == ("192.0.2.1", 23456)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert hosts._rendezvous(job(one, other), {**told, "port": 23456}) == ("10.0.0.1", 29500)
    monkeypatch.setenv("MASTER_PORT", "high")
    with pytest.raises(RecipeError, match="MASTER_PORT: 'high' is not a number"):
        hosts._rendezvous(job(one, other), {**told, "port": 23456})
    assert address(one, other) == "192.0.2.1"
    assert address(other, one) == "192.0.2.9"  # its name means another machine on each
    told["addresses"] = []
    with pytest.raises(RecipeError, match="no address that other hosts could reach"):
        address(other, one)
