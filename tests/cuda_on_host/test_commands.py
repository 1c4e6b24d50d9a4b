"""Commands of llmtrain on two GPUs of the device for tests, as a user gives them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from llmtrain.checkpoint.folder import step_folder
from tests.cuda_on_host.conftest import environment
from tests.helpers.commands import llmtrain, metrics

pytestmark = pytest.mark.slow


@pytest.fixture
def two_gpus(libraries, tmp_path):
    """The environment of a command; at the end, no process may have touched two devices."""
    yield environment(libraries, devices=2, contexts=contexts_in(tmp_path))
    assert_one_device_each(contexts_in(tmp_path), devices=2)


def contexts_in(folder: Path) -> Path:
    (folder / "contexts").mkdir(exist_ok=True)
    return folder / "contexts"


def assert_one_device_each(contexts: Path, devices: int) -> None:
    touched = defaultdict(list)
    for file in contexts.iterdir():
        process, _, device = file.name.partition(".")
        touched[process].append(int(device))
    assert set(range(devices)) >= {one for found in touched.values() for one in found} > set()
    assert all(len(found) == 1 for found in touched.values()), dict(touched)


def test_a_run_is_stopped_resumed_exported_and_sampled(two_gpus, small_recipe, tmp_path):
    """With evaluations and background saves. `test_training.py` compares what is computed."""
    run_dir = tmp_path / "run"
    settings = ("--nproc", "2", "--set", "export.sample_prompt=import", "--set", "parallel.precision=fp32")
    command = ("train", small_recipe, *settings, "--run-dir")
    first = subprocess.Popen(
        [sys.executable, "-m", "llmtrain", *map(str, command), str(run_dir)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
        text=True,
        env=two_gpus,
    )
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").exists() or not metrics(run_dir):
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=120)
    assert first.returncode == 75, said

    second = llmtrain(*command, run_dir, **two_gpus)
    assert second.returncode == 0, second.stderr + second.stdout
    assert (run_dir / "export" / "model.safetensors").exists()
    assert "import" in second.stdout
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["cluster"]["device"] == "h100"
    assert plan["recipe"]["checkpoint"]["background"]
    assert step_folder(run_dir / "checkpoints", 8).exists()
    assert [line["step"] for line in metrics(run_dir) if "eval_loss" in line] == [6, 12]


def test_doctor_reports_the_gpus(two_gpus):
    result = llmtrain("doctor", "--json", **two_gpus)
    assert "NVIDIA H100 80GB HBM3" in result.stdout, result.stderr
    assert not [line for line in result.stdout.splitlines() if "Traceback" in line]


def verify(recipe, environment, run_dir, devices: int, plans: str) -> list[str]:
    """The names of the plans, all of which are certified."""
    options = ("--nproc", devices, "--plans", plans, "--steps", 2, "--json", "--run-dir", run_dir)
    result = llmtrain("verify", recipe, *options, **environment)
    assert result.returncode == 0, result.stderr + result.stdout
    found = json.loads(result.stdout)["plans"]
    assert all(plan["certified"] for plan in found), found
    return [plan["name"] for plan in found]


@pytest.mark.breadth
def test_two_plans_are_verified(two_gpus, small_recipe, tmp_path):
    plans = {"dp2-zero2-acc2", "dp1-pp2-zero1-acc4"}
    assert set(verify(small_recipe, two_gpus, tmp_path / "run", 2, ",".join(plans))) == plans


@pytest.mark.breadth
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3", "ddp", "fsdp2", "data_parallel"])
def test_all_plans_of_four_gpus_are_verified(libraries, small_recipe, tmp_path, strategy):
    contexts = contexts_in(tmp_path)
    given = environment(libraries, devices=4, contexts=contexts)
    assert len(verify(small_recipe, given, tmp_path / "run", 4, f"*-{strategy}-*")) > 5
    if strategy != "data_parallel":  # whose one process has all devices
        assert_one_device_each(contexts, devices=4)


@pytest.mark.breadth
def test_kernels_are_tuned(two_gpus, small_recipe):
    result = llmtrain("tune", small_recipe, "--nproc", 1, "--set", "kernels.blocks=eager", "--json", **two_gpus)
    assert result.returncode == 0, result.stderr + result.stdout
    assert json.loads(result.stdout)
