"""Arguments and options arrive in Slurm unchanged, or are refused; on a real Slurm."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.launch.discovery.slurm_step import hosts, tasks_per_node
from llmtrain.launch.jobs.slurm import SlurmJob, SlurmOptions, _directive, render_job
from llmtrain.recipe.cluster import Cluster
from tests.helpers.launching_doc import commands
from tests.helpers.nasty import CANARY, WORDS, words
from tests.helpers.slurm_cluster import missing, slurm_cluster

REPOSITORY = Path(__file__).parents[2]
WHO = """
import dataclasses, json, os, sys
from llmtrain.launch import discover
print("<<" + repr((dataclasses.asdict(discover()), os.environ["SLURM_JOB_ID"])) + ">>", flush=True)
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def test_arguments_and_variables_pass_unchanged_through_the_rendered_script(cluster, tmp_path):
    """The script runs `python -m llmtrain`, which here is a module that writes down what it was given."""
    package = tmp_path / "spy" / "llmtrain"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    spy = """import json, os, pathlib, sys
heard = json.dumps([sys.argv[1:], os.environ["NASTY"]])
pathlib.Path(f"heard_{os.environ['SLURM_PROCID']}").write_text(heard)
"""
    (package / "__main__.py").write_text(spy)
    given, value = [word for word in words(3) if word != ":"], "".join(WORDS)
    script = REPOSITORY / "slurm" / "train.sbatch"
    options = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", f"--chdir={tmp_path}", "--wait"]
    env = {"PYTHONPATH": str(tmp_path / "spy"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    cluster.run("sbatch", *options, "--output=out", script, *given, **env, NASTY=value)
    answers = [json.loads((tmp_path / f"heard_{rank}").read_text()) for rank in range(2)]
    assert answers == [[["train", *given], value]] * 2
    assert not list(tmp_path.rglob("executed"))


def test_arguments_of_a_plan_pass_unchanged_through_its_job_script(cluster, tmp_path):
    """`srun` starts the workers' command with every word as it was; the working folder has a bad name as well."""
    folder = tmp_path / "it's $(touch executed) ü"
    folder.mkdir()
    given = tuple(word for word in words(4) if word != ":")
    program = "import json, os, sys; open('heard_' + os.environ['SLURM_PROCID'], 'w').write(json.dumps(sys.argv[1:]))"
    options = SlurmOptions(cpus_per_task=1, output="out", directives=("--wait",))
    script = render_job(SlurmJob("a 'name", Cluster(nodes=2), 2, ("x.py", *given), folder / "run", folder, options))
    start = shlex.join([sys.executable, "-m", "llmtrain"])
    assert script.count(f"{start} train") == 1
    script = script.replace(start, shlex.join([sys.executable, "-c", program]))
    env = cluster.environment()
    done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr + (folder / "out").read_text()
    assert [json.loads((folder / f"heard_{rank}").read_text()) for rank in range(2)] == [["train", "x.py", *given]] * 2
    assert not list(tmp_path.rglob(CANARY))


NAMES = [word for word in WORDS if word.strip() and word.isprintable()]


@pytest.mark.parametrize("name", NAMES)
def test_a_directive_keeps_its_value(cluster, tmp_path, name):
    script = f"#!/bin/bash\n#SBATCH {_directive('comment', name)}\n#SBATCH --hold\ntrue\n"
    env = cluster.environment()
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    shown = cluster.run("squeue", "-h", "-j", job, "-O", "Comment:200").rstrip("\n")
    cluster.run("scancel", job)
    assert shown.rstrip() == name


@pytest.mark.parametrize("names", ["n[1-3,7]", "n[08-11],gpu5", "rack[0-1]n[1-2]", "a,b,c", "n[1-2],m[3,5-6]"])
def test_node_lists_are_read_as_slurm_reads_them(cluster, names):
    assert hosts(names) == cluster.run("scontrol", "show", "hostnames", names).split()


@pytest.mark.parametrize("tasks", [3, 4])
def test_each_task_gets_its_rank_even_if_nodes_differ(cluster, tmp_path, tasks):
    script = tmp_path / "who.py"
    script.write_text(WHO)
    extent = ("--nodes=2", f"--ntasks={tasks}", "--distribution=block")
    told = cluster.run("srun", *extent, sys.executable, script, PYTHONPATH=str(REPOSITORY))
    answers = [ast.literal_eval(part.partition(">>")[0]) for part in told.split("<<")[1:]]
    ranks = sorted((rank for rank, _ in answers), key=lambda rank: rank["rank"])
    assert [rank["rank"] for rank in ranks] == list(range(tasks))
    assert {(rank["world_size"], rank["launcher"], rank["nodes"], rank["master_addr"]) for rank in ranks} == {
        (tasks, "slurm", 2, "n1")
    }
    counts = [rank["local_world_size"] for rank in ranks if rank["local_rank"] == 0]
    assert sum(counts) == tasks
    assert len({rank["master_port"] for rank in ranks}) == 1
    assert tasks_per_node(",".join(map(str, counts))) == counts


def test_a_single_task_is_no_worker(cluster, tmp_path):
    program = "from llmtrain.launch import discover; print(discover())"
    assert cluster.run("srun", "--ntasks=1", sys.executable, "-c", program, PYTHONPATH=str(REPOSITORY)) == "None\n"


def test_errors_of_sbatch_are_reported(cluster, tmp_path):
    line = [sys.executable, "-m", "llmtrain", "train", REPOSITORY / "recipes" / "tiny.py", "--launcher", "slurm"]
    env = cluster.environment({"PYTHONPATH": str(REPOSITORY)})
    options = ["--slurm", "partition=nowhere", "--run-dir", tmp_path / "run"]
    done = subprocess.run(list(map(str, [*line, *options])), capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 2
    assert "invalid partition specified: nowhere" in done.stderr
    assert "[slurm.refused]" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("line", commands("Slurm"))
def test_slurm_accepts_the_documented_commands(cluster, line):
    """Jobs that are written down, and that Slurm says it would start."""
    if line.startswith("llmtrain"):
        line = f"{sys.executable} -m {line.removesuffix(' | sbatch').removesuffix(' --dry-run')} --dry-run | sbatch"
    env = cluster.environment({"PYTHONPATH": str(REPOSITORY)})
    command = line.replace("sbatch", "sbatch --test-only", 1) if line.startswith("sbatch") else f"{line} --test-only"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr
