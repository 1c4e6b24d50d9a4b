"""Names, paths and values arrive unchanged, and nothing in them is executed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest

from llmtrain.errors import RecipeError
from llmtrain.launch.jobs.slurm import SlurmJob, SlurmOptions, render_job
from llmtrain.launch.tools import TOOLS, manual_commands
from llmtrain.recipe.cluster import Cluster
from tests.helpers.nasty import CANARY, WORDS, words
from tests.helpers.small_plan import small_plan
from tools.configurations import slurm

SPY = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["HEARD"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""
SEEDS = range(5)


@pytest.fixture
def spy(tmp_path, monkeypatch):
    """Puts programs into PATH that write down their arguments; returns a function that reads them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "scontrol", "torchrun", "python", "accelerate", "llmtrain"):
        program = folder / name
        program.write_text(SPY if name != "scontrol" else "#!/bin/sh\necho n1\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    heard = tmp_path / "heard"
    heard.touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HEARD", str(heard))
    monkeypatch.chdir(tmp_path)
    return lambda: [json.loads(line) for line in heard.read_text().splitlines()]


def _run(shell: str, script: str, **env: str) -> None:
    done = subprocess.run([shell], input=script, capture_output=True, text=True, env={**os.environ, **env}, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("seed", SEEDS)
def test_arguments_pass_unchanged_through_a_job_script(spy, tmp_path, seed):
    given = tuple(word for word in words(seed) if word != ":")
    options = SlurmOptions(setup=("export MODULES=loaded",))
    run_dir = tmp_path / "it's a run $(touch executed)"
    job = SlurmJob("tiny", Cluster(nodes=2), 2, ("recipes/tiny.py", *given), run_dir, tmp_path, options)
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    _run("bash", render_job(job), **allocation)
    started = [call for call in spy() if call[0] == "srun"]
    assert [call[call.index("train") :] for call in started] == [["train", "recipes/tiny.py", *given]]
    assert not list(tmp_path.rglob(CANARY))


def test_an_argument_at_which_srun_would_split_the_command_is_refused(spy, tmp_path):
    """`srun a : b` runs b as well (seen, Slurm 22.05)."""
    job = SlurmJob("tiny", Cluster(), 1, ("recipes/tiny.py", "--resume", ":"), tmp_path, tmp_path, SlurmOptions())
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    for script in (render_job(job), slurm()["slurm/verify.sbatch"]):
        line = ["bash", "-s", "recipes/tiny.py", ":", "touch", CANARY]
        done = subprocess.run(line, input=script, capture_output=True, text=True, env={**os.environ, **allocation})
        assert done.returncode == 2
        assert "a lone colon" in done.stderr
    assert not spy()


@pytest.mark.parametrize("seed", SEEDS)
def test_settings_of_an_array_pass_unchanged(spy, tmp_path, seed):
    choices = tuple(word for word in words(seed) if word and word.isprintable())
    job = SlurmJob("tiny", Cluster(), 1, ("recipes/tiny.py",), tmp_path / "a 'b", tmp_path, SlurmOptions(sweep=choices))
    script = render_job(job)
    number = seed * 13 % len(choices)
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    _run("bash", script, **allocation, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID=str(number))
    [started] = [call for call in spy() if call[0] == "srun"]
    choice = choices[number]
    folder = f"{tmp_path / 'a '}'b/{choice.replace('/', '_')}"
    assert started[started.index("train") :] == ["train", "recipes/tiny.py", "--set", choice, "--run-dir", folder]
    assert not list(tmp_path.rglob(CANARY))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("seed", SEEDS)
def test_arguments_pass_unchanged_through_printed_commands(spy, tmp_path, tool, seed):
    given = tuple(words(seed))
    plan = small_plan().model_copy(update={"cluster": Cluster(nodes=2, devices_per_node=1)})
    folder, planned = tmp_path / "it's $(touch executed)", ("plan", "x.py", *given)
    lines = manual_commands(tool, plan, ("x.py", *given), folder, planned)
    _run("sh", "\n".join(lines), HEAD="a b", NODE="1")
    calls = spy()
    assert calls[-1][-1 - len(given) :] == ["x.py", *given]
    assert {"a b", "1"} < set(calls[-1])
    if tool == "accelerate":
        assert calls[0] == ["llmtrain", *planned, "--write", str(folder)]
        assert calls[1][calls[1].index("--config_file") + 1] == str(folder / "accelerate.yaml")
    assert not list(tmp_path.rglob(CANARY))


@pytest.mark.parametrize("name", WORDS)
def test_a_name_is_in_a_directive_or_refused(tmp_path, name):
    """What sbatch makes of it is tried on a real Slurm."""
    job = SlurmJob(name, Cluster(), 1, ("x.py",), tmp_path, tmp_path, SlurmOptions())
    if name and name.isprintable():
        [line] = [one for one in render_job(job).splitlines() if one.startswith("#SBATCH --job-name=")]
        assert line.isprintable()
    else:
        with pytest.raises(RecipeError, match=r"an #SBATCH line cannot contain"):
            render_job(job)
