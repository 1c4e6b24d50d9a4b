"""The job scripts as bash runs them, with stand-ins for `srun` and `scontrol`; tests/launch has a real Slurm."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from llmtrain.errors import RecipeError
from llmtrain.launch.jobs.slurm import (
    SlurmJob,
    SlurmOptions,
    parse_job_options,
    render_job,
)
from llmtrain.recipe.cluster import Cluster

FOLDER = Path(__file__).parents[2] / "slurm"
SRUN = """#!/bin/bash
if [ "${@: -1}" = true ]; then echo asked >> "$CALLS/nodes"; exit "$(cat "$CALLS/node")"; fi
printf '%s\\0' "$@" "$MASTER_ADDR:$MASTER_PORT" > "$CALLS/srun.new"
trap 'echo USR1 >> "$CALLS/forwarded"; echo 75 > "$CALLS/end.new"; mv "$CALLS/end.new" "$CALLS/end"' USR1
mv "$CALLS/srun.new" "$CALLS/srun"
while [ ! -e "$CALLS/end" ]; do sleep 0.02; done
exit "$(cat "$CALLS/end")"
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
"show hostnames") printf 'node-7\\nnode-8\\n' ;;
"show node") echo "NodeName=$3 Gres=gpu:8 NodeAddr=127.0.0.1 NodeHostName=$3" ;;
requeue*) echo "$2" > "$CALLS/requeued" ;;
esac
"""


@pytest.fixture
def job(tmp_path):
    """Starts a script with arguments, as a job of two nodes would."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    env = {**os.environ, **slurm, "CALLS": str(tmp_path), "PATH": f"{programs}:{os.environ['PATH']}"}
    env.pop("SLURM_CPUS_PER_TASK", None)
    (tmp_path / "node").write_text("0")

    def start(*arguments, script=FOLDER / "train.sbatch", **more):
        command = ["bash", str(script), *arguments]
        return subprocess.Popen(
            command, env={**env, **more}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
        )

    return start


def finished(process):
    output, errors = process.communicate(timeout=30)
    return process.returncode, output + errors


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def called(tmp_path):
    return (tmp_path / "srun").read_text().split("\0")[:-1]


def a_job(*options, command=("recipes/tiny.py",), device="h100"):
    cluster = Cluster(nodes=2, devices_per_node=8, device=device)
    parsed = parse_job_options(SlurmOptions, "slurm", options)
    return SlurmJob("tiny", cluster, 2, command, Path("/runs/a b"), Path("/home/me"), parsed)


def directives(script):
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sbatch")), ids=lambda path: path.name)
def test_scripts_have_valid_syntax(script):
    subprocess.run(["bash", "-n", script], check=True)


def test_one_task_for_each_device_with_the_arguments_as_given(job, tmp_path):
    (tmp_path / "end").write_text("0")
    arguments = ["recipes/tiny.py", "--run-dir", "a b $(touch x)", "--set", 'export.sample_prompt="it\'s"', ""]
    assert finished(job(*arguments, SLURM_CPUS_PER_TASK="4"))[0] == 0
    words = ["--kill-on-bad-exit=1", "--cpus-per-task=4", "python", "-m", "llmtrain", "train", *arguments]
    assert called(tmp_path) == [*words, "127.0.0.1:23456"]
    assert not (tmp_path / "x").exists()


def test_a_port_in_use_is_not_chosen(job, tmp_path):
    import socket

    (tmp_path / "end").write_text("0")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 23457))
        other.listen()
        assert finished(job("recipes/tiny.py", SLURM_JOB_ID="123457"))[0] == 0
    assert called(tmp_path)[-1] == "127.0.0.1:23458"


@pytest.mark.parametrize(
    ("code", "node", "asked", "requeued"),
    [
        (0, 0, False, False),
        (2, 1, False, False),  # a mistake, whatever the nodes do
        (5, 0, True, False),  # the run's own failure, in a folder that is not known
        (5, 1, True, True),  # a node does not answer
        (137, 1, True, True),
    ],
)
def test_exit_codes_and_nodes_decide_whether_a_job_is_requeued(job, tmp_path, code, node, asked, requeued):
    (tmp_path / "end").write_text(str(code))
    (tmp_path / "node").write_text(str(node))
    assert finished(job("recipes/tiny.py"))[0] == code
    assert (tmp_path / "nodes").exists() == asked
    assert (tmp_path / "requeued").exists() == requeued


def test_a_dead_run_is_restarted_until_it_dies_twice_in_the_same_place(job, tmp_path):
    (tmp_path / "end").write_text("5")
    run_dir = tmp_path / "a run"
    (run_dir / "logs").mkdir(parents=True)
    arguments = ("recipes/tiny.py", "--run-dir", str(run_dir))

    def is_requeued(**env):
        (tmp_path / "requeued").unlink(missing_ok=True)
        code, told = finished(job(*arguments, **env))
        assert code == 5
        assert ("died twice in the same place" in told) == (not (tmp_path / "requeued").exists())
        return (tmp_path / "requeued").exists()

    assert is_requeued()  # before its first step
    assert not is_requeued()
    (run_dir / "metrics.jsonl").write_text('{"step": 10, "loss": 1}\n{"step": 20, "loss": 1}\n')
    assert is_requeued()
    assert not is_requeued()
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/latest").write_text("step_00000020\n")
    assert is_requeued()
    assert not is_requeued()
    assert is_requeued(SLURM_JOB_ID="654321")  # somebody has mended it and submitted it again


def test_a_job_whose_step_alone_was_stopped_is_not_requeued(job, tmp_path):
    (tmp_path / "end").write_text("75")
    (tmp_path / "logs").mkdir()
    assert finished(job("recipes/tiny.py", f"--run-dir={tmp_path}"))[0] == 75
    assert not (tmp_path / "requeued").exists()


def test_the_warning_reaches_the_ranks_and_then_requeues_the_job(job, tmp_path):
    process = job("recipes/tiny.py")
    wait_for(tmp_path / "srun")
    process.send_signal(signal.SIGUSR1)
    assert finished(process)[0] == 75
    assert (tmp_path / "forwarded").read_text() == "USR1\n"
    assert (tmp_path / "requeued").read_text() == "123456\n"


def test_the_number_of_requeues_is_limited(job, tmp_path):
    process = job("recipes/tiny.py", SLURM_RESTART_COUNT="20")
    wait_for(tmp_path / "srun")
    process.send_signal(signal.SIGUSR1)
    code, told = finished(process)
    assert code == 75
    assert "submit the job again to continue" in told
    assert not (tmp_path / "requeued").exists()


def test_a_cancelled_job_is_not_requeued(job, tmp_path):
    process = job("recipes/tiny.py")
    wait_for(tmp_path / "srun")
    process.terminate()
    time.sleep(0.2)
    (tmp_path / "end").write_text("75")
    assert finished(process)[0] == 75
    assert not (tmp_path / "requeued").exists()
    assert not (tmp_path / "nodes").exists()


def test_a_task_of_an_array_trains_its_setting_and_requeues_itself(job, tmp_path):
    (tmp_path / "end").write_text("5")
    (tmp_path / "node").write_text("1")
    words = ["runs/a sweep", "optim.lr=1e-3", "data.tokenizer=a/b c", "--", "recipes/tiny.py", "--max-steps", "3"]
    array = {"SLURM_ARRAY_JOB_ID": "123400", "SLURM_ARRAY_TASK_ID": "1"}
    assert finished(job(*words, script=FOLDER / "train_array.sbatch", **array))[0] == 5
    choice = ["--set", "data.tokenizer=a/b c", "--run-dir", "runs/a sweep/data.tokenizer=a_b c"]
    assert called(tmp_path)[5:-1] == ["train", "recipes/tiny.py", "--max-steps", "3", *choice][1:]
    assert (tmp_path / "requeued").read_text() == "123400_1\n"


def test_a_rendered_sweep_trains_its_settings_and_requeues_itself(job, tmp_path):
    (tmp_path / "end").write_text("0")
    script = tmp_path / "job.sbatch"
    script.write_text(render_job(a_job("sweep=optim.lr=1e-3", "sweep=optim.lr=$(touch x)")))
    array = {"SLURM_ARRAY_JOB_ID": "123400", "SLURM_ARRAY_TASK_ID": "1"}
    assert finished(job(script=script, **array))[0] == 0
    choice = ["--set", "optim.lr=$(touch x)", "--run-dir", "/runs/a b/optim.lr=$(touch x)"]
    assert called(tmp_path)[5:-1] == ["recipes/tiny.py", *choice]
    assert "--array=0-1" in directives(script.read_text())


@pytest.mark.parametrize("name", ["train", "train_array", "prepare_data", "verify"])
def test_without_a_recipe_the_usage_is_printed(job, name):
    code, told = finished(job(script=FOLDER / f"{name}.sbatch", SLURM_ARRAY_TASK_ID="0", SLURM_ARRAY_JOB_ID="1"))
    assert code == 2
    assert told.startswith("usage: sbatch")


def test_the_directives_follow_the_plan_and_the_options():
    options = ("partition=long", "time=2-00:00:00", "warn_s=600", "directives=--constraint=ib&h100", "account=my lab")
    wanted = ["--job-name=tiny", "--chdir=/home/me", "--output=%x-%j.log", "--partition=long", '--account="my lab"']
    wanted += ["--time=2-00:00:00", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--signal=B:USR1@600"]
    assert directives(render_job(a_job(*options))) == [
        *wanted,
        *("--open-mode=append", "--requeue", "--constraint=ib&h100"),
    ]


def test_a_plan_on_cpus_asks_for_no_gpu():
    assert not [line for line in directives(render_job(a_job(device="cpu"))) if "gpu" in line]


def test_nodes_may_have_different_numbers_of_devices():
    lines = directives(render_job(a_job("tasks=12")))
    assert {"--nodes=2", "--ntasks=12", "--gpus-per-task=1"} <= set(lines)
    assert not [line for line in lines if "per-node" in line]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("container=/img/a b.sqsh", "mounts=/data:/data"), "'--container-image=/img/a b.sqsh'"),
        (("container=a.sif", "runtime=apptainer", "mounts=/d:/d"), "apptainer exec --nv --bind /d:/d a.sif python"),
    ],
)
def test_containers_are_started_by_srun_or_apptainer(options, line):
    script = render_job(a_job(*options))
    assert line in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (("=",), ["--slurm '='"]),
        (("tim=1",), ["--slurm tim"]),
        (("time",), ["--slurm time"]),
        (("time=1", "time=2"), ["--slurm time"]),
        (("warn_s=x", "cpus_per_task=0"), ["--slurm cpus_per_task", "--slurm warn_s"]),
        (("warn_s=70000",), ["--slurm warn_s"]),
        (("max_requeues=-1",), ["--slurm max_requeues"]),
        (("partition=a\nb",), ["--slurm partition"]),
        (("setup=a\nb",), ["--slurm setup"]),
        (("mounts=/a:/b",), ["--slurm mounts"]),
        (("directives=constraint=x",), ["--slurm directives"]),
        (("runtime=docker", "nodes=3"), ["--slurm nodes", "--slurm runtime"]),
    ],
)
def test_invalid_options_are_named(options, fields):
    with pytest.raises(RecipeError) as error:
        parse_job_options(SlurmOptions, "slurm", options)
    assert [problem.field for problem in error.value.problems] == fields
    assert {problem.rule for problem in error.value.problems} == {"slurm.option"}


def test_a_path_that_a_script_cannot_contain_is_refused():
    job = a_job()
    broken = SlurmJob(job.name, job.cluster, 2, job.command, job.run_dir, Path("/home/me\nme"), job.options)
    with pytest.raises(RecipeError, match="an #SBATCH line cannot contain"):
        render_job(broken)
