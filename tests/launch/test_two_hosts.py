"""DeepSpeed's launcher, alone and under our command, trains over two hosts what one process trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from two_hosts import INTERFACE, TwoHosts, missing, two_hosts

from llmtrain.verify.compare import FP32

REPOSITORY = Path(__file__).parents[2]
RECIPE = REPOSITORY / "recipes" / "tiny.py"
FIELDS = ("logging.every_steps=1", "checkpoint.every_steps=1000", "evaluation.every_steps=3", "export.at_end=false")
STEPS = 6

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


@pytest.fixture(scope="module")
def workers_environment(tmp_path_factory):
    return {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "LLMTRAIN_CACHE": str(tmp_path_factory.mktemp("cache")),
    }


def _arguments(run_dir: Path, *fields: str) -> list[str]:
    sets = [part for field in (*FIELDS, *fields) for part in ("--set", field)]
    return ["--run-dir", str(run_dir), "--max-steps", str(STEPS), *sets]


def _logged(run_dir: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


@pytest.fixture(scope="module")
def one(workers_environment, tmp_path_factory):
    """The run of one process."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    command = [sys.executable, "-m", "llmtrain", "train", f"{RECIPE}:verify", *_arguments(run_dir)]
    result = subprocess.run(command, env={**os.environ, **workers_environment}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return run_dir


STAGES = ("parallel.pipeline=2", "parallel.zero_stage=1")


def _is_the_run_of(one: Path, two: Path) -> None:
    plan = json.loads((two / "plan.json").read_text())
    assert {key: plan["layout"][key] for key in ("dp", "pp", "zero_stage")} == {"dp": 2, "pp": 2, "zero_stage": 1}
    assert plan["cluster"]["nodes"] == plan["cluster"]["devices_per_node"] == 2
    for key, entries in (("loss", STEPS), ("grad_norm", STEPS), ("eval_loss", STEPS // 3)):
        expected = _logged(one, key)
        assert len(expected) == entries
        assert _logged(two, key) == pytest.approx(expected, rel=FP32)


def test_a_pipeline_over_two_hosts_trains_as_one_process(hosts, workers_environment, one, tmp_path):
    command = hosts.deepspeed(2, RECIPE, "--variant", "verify", *_arguments(tmp_path / "two", *STAGES))
    environment = hosts.environment(workers_environment)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    _is_the_run_of(one, tmp_path / "two")


def _ours(hosts: TwoHosts, run_dir: Path, slots: int, *arguments: str) -> list[str]:
    """`llmtrain train --launcher deepspeed`, given on the first host."""
    launcher = ("--launcher", "deepspeed", "--hostfile", str(hosts.hostfile(slots)))
    train = (sys.executable, "-m", "llmtrain", "train", f"{RECIPE}:verify", *launcher)
    return hosts.hosts[0].command(*train, *(arguments or _arguments(run_dir, *STAGES)))


def _environment(hosts: TwoHosts, workers: dict[str, str], **more: str) -> dict[str, str]:
    return {**hosts.environment(workers), "PYTHONPATH": str(REPOSITORY), **more}


def test_our_own_command_trains_the_same_and_hands_everything_on_as_it_is(hosts, workers_environment, one, tmp_path):
    run_dir, trap = tmp_path / "a run's $(dir)", tmp_path / "owned"
    value = f"a  b'c\"$(touch {trap})`touch {trap}`\n; touch {trap} # \\ ü"
    environment = _environment(hosts, workers_environment, TORCH_TOLD=value)
    result = subprocess.run(_ours(hosts, run_dir, 2), env=environment, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert "[INFO]" not in result.stdout
    _is_the_run_of(one, run_dir)
    _chose_the_cable(run_dir, ranks=4)
    assert not trap.exists()
    assert not list(Path("/tmp").glob("llmtrain-*/job.json"))


def _chose_the_cable(run_dir: Path, ranks: int) -> None:
    """Nobody has told gloo of it, and the host's own name would mislead."""
    for rank in range(ranks):
        said = (run_dir / "logs" / f"rank_{rank}.log").read_text()
        assert f"network interface of gloo: {INTERFACE} (" in said
        assert "resolves to 127.0.1.1" in said
    assert json.loads((run_dir / "environment.json").read_text())["variables"]["GLOO_SOCKET_IFNAME"] == INTERFACE


def test_variables_arrive_as_they_were(hosts, workers_environment, tmp_path):
    """Each worker writes down what it was given, in place of training."""
    value = "a  b'c\"$HOME `x` $(x)\n; \\ ü %n"
    program = "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(os.environ['TORCH_TOLD'])"
    job = f"""
from pathlib import Path
from llmtrain.launch.hostfile import read_hosts
from llmtrain.launch.hosts import HostsJob, run_on_hosts
from llmtrain.run_dir import RunDir

hosts = tuple(read_hosts(Path({str(hosts.hostfile(1))!r})))
argv = ("-c", {program!r}, {str(tmp_path / "told ")!r})
raise SystemExit(run_on_hosts(HostsJob(hosts, Path("none"), argv, RunDir(Path({str(tmp_path)!r})))))
"""
    environment = _environment(hosts, workers_environment, TORCH_TOLD=value)
    command = hosts.hosts[0].command(sys.executable, "-c", job)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [(tmp_path / f"told {rank}").read_text() for rank in (0, 1)] == [value, value]


def test_a_signal_saves_on_all_hosts_and_the_same_command_goes_on(hosts, workers_environment, tmp_path):
    run_dir = tmp_path / "run"
    steps = ("logging.every_steps=1", "export.at_end=false", "evaluation.every_steps=0", "train.max_steps=100000")
    sets = [part for field in (*steps, "parallel.zero_stage=1") for part in ("--set", field)]
    environment = _environment(hosts, workers_environment)
    codes, logged = [], []
    for _ in range(2):
        command = _ours(hosts, run_dir, 1, "--run-dir", str(run_dir), *sets)
        before = len(logged)
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        metrics = run_dir / "metrics.jsonl"
        while process.poll() is None and (not metrics.exists() or len(_logged(run_dir, "loss")) < before + 5):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)  # `ip netns exec` has become the command
        said = process.communicate(timeout=120)[0]
        codes.append(process.returncode)
        logged = sorted(_logged(run_dir, "loss"))
    assert codes == [75, 75], said
    assert "stopped on SIGTERM" in said
    assert "continuing after step" in said
    assert logged == list(range(1, len(logged) + 1))


def test_a_host_that_does_not_answer_is_named_and_nothing_starts(hosts, workers_environment, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(f"{hosts.hosts[0].address} slots=1\n192.0.2.77 slots=1\n")
    train = (sys.executable, "-m", "llmtrain", "train", f"{RECIPE}:verify", "--launcher", "deepspeed")
    command = hosts.hosts[0].command(*train, "--hostfile", hostfile, *_arguments(tmp_path / "run"))
    environment = _environment(hosts, workers_environment)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "192.0.2.77: does not answer ssh" in result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_host_that_is_lost_ends_the_job_on_the_others(workers_environment, tmp_path):
    """The last test: nothing runs on that host any more, its ssh server neither."""
    (tmp_path / "hosts").mkdir()
    with two_hosts(tmp_path / "hosts") as both:
        steps = ("logging.every_steps=1", "train.max_steps=100000", "evaluation.every_steps=0")
        sets = [part for field in (*steps, "parallel.zero_stage=1") for part in ("--set", field)]
        run_dir = tmp_path / "run"
        command = _ours(both, run_dir, 1, "--run-dir", str(run_dir), *sets)
        environment = _environment(both, workers_environment)
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while not (run_dir / "metrics.jsonl").exists() or len(_logged(run_dir, "loss")) < 5:
            assert process.poll() is None
            time.sleep(0.05)
        both.hosts[1].kill_all()
        said, error = process.communicate(timeout=90)
        assert process.returncode == 5, said + error
        assert "Traceback" not in error
        assert "--launcher deepspeed: the ssh connection to a host has ended, or the host is lost" in error
        assert not [pid for pid in both.hosts[0].processes() if b"start.py" in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
